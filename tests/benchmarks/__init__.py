"""Step times against the nearest peers, on the same model, micro-batches and machine, in alternating rounds of one run.

``python -m tests.benchmarks [--only pp2,dp2]``. Nothing here is asserted: a stopwatch test fails when neighbours work.
"""
