"""One step of training or evaluation, from a batch to its outcome.

A batch enters each room once on its way down, and once on its way up::

    down                                                            up
    strategy         which Step?                                    replays the logs, hands the loss to Lightning
    step             PlainStep: whole │ ScheduledStep: cut, weighed  outcome: merged, averaged, delivered
    pipeline/run     the schedule, as a program                     outputs; gradients are in their sink
    pipeline/stage   a micro-batch on a virtual stage               boundary or output
    the user         training_step(micro-batch)                     loss; `self.log` goes to `logs`, which holds it

Two calls go against the arrows, because only those who make them know when: the stage calls the user's step, and the
executor announces to the gradients' sink that a backward is the last.
"""
