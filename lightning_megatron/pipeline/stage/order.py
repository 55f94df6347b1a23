"""Refuses steps that call a layer of a cut module twice, or leave one out."""

from __future__ import annotations

from typing import NoReturn

from lightning_megatron.pipeline.stage.final_state import TRIAL, tried

_EVALUATE = ("validation_step", "test_step", "predict_step")
_EVALUATES = frozenset((*_EVALUATE, *map(tried, _EVALUATE)))
LEFT_OUT = -1  # in the place of the next layer: the stages before have left the batch out
STARTS_OVER = frozenset((*_EVALUATES, TRIAL))


class StageDone(BaseException):
    """Ends the user's step once this stage's layers have run; not an ``Exception``, so user code does not catch it."""


class CalledAgain(BaseException):
    """A step of evaluation, or a trial, calls the layers again, or one of evaluation calls none.

    It is no ``Exception``, which user code might catch.
    """


def refuse_layer(trunk: str, index: int, expected: int, where: str) -> NoReturn:
    """Complain about a call of layer ``index`` where no step runs, or where layer ``expected`` comes next.

    Args:
        trunk: name of the layers.
        index: the layer that is called.
        expected: the one that comes next; or `LEFT_OUT`.
        where: name of the step; ``""`` for none.

    Raises:
        CalledAgain: a step calls it again, which may be started over.
        RuntimeError: all else.
    """
    if where in STARTS_OVER and index < expected:
        raise CalledAgain
    if where and expected == LEFT_OUT:
        raise RuntimeError(
            f"`{where.split()[0]}` has left its batch out by `return None` before the layers of `{trunk}` on an "
            "earlier pipeline stage, and calls them on this one. Decide by what is equal on all stages (the batch, its "
            "number, what the module counts), or use `pipeline_parallel_size=1`."
        )
    if not where:
        raise RuntimeError(
            f"the layers of `{trunk}` were called outside of a training, validation, test or predict step. They are "
            "spread over the pipeline stages. Outside of a step call a module that contains them all (the model, not "
            "its parts), on every rank, under `torch.no_grad()`; build a copy of the model in `__init__` or `setup`, "
            "and not in a later hook; or use `pipeline_parallel_size=1`."
        )
    if index < expected:
        last = expected - 1
        what = f"layer {index} of `{trunk}` was called again after layer {last}: the layers are called twice"
    else:
        what = f"layer {index} of `{trunk}` was called, but layer {expected} comes next: a layer was left out"
    raise RuntimeError(
        f"{what} in one step. A pipeline needs every layer exactly once, in order, or to see in the first step that "
        "they are called several times: let the first step call them as often as the later ones, drop no layers, or "
        "use `pipeline_parallel_size=1`."
    )


def refuse_end(trunk: str, called: int, layers: int, where: str, *, nothing: bool = False) -> NoReturn:
    """Complain about a step that has ended after ``called`` of all layers.

    Args:
        trunk: name of the layers.
        called: how many of them it has called.
        layers: how many there are.
        where: name of the step.
        nothing: whether it returned ``None``.

    Raises:
        CalledAgain: a step of evaluation has called none (a baseline, or a measure of the data): every stage can run
            it from beginning to end.
        RuntimeError: all else.
    """
    if not called and where in _EVALUATES:
        raise CalledAgain
    if nothing and called <= 0 and where.startswith("training_step"):
        raise RuntimeError(
            f"`training_step` returned None without having called the layers of `{trunk}`. A batch is left out so "
            "where the code of `training_step` itself says `return None`, on all stages alike, with one replica and "
            "`whole_batch_loss='auto'`; otherwise return a loss that is zero, computed from the layers' output."
        )
    said = f"called only {called} of the {layers}" if called > 0 else "did not call the"
    raise RuntimeError(
        f"the step {said} layers of `{trunk}`; under a pipeline every layer must be called exactly once, and layer "
        f"{called} was not called. If these are not the module's layers, name them with `pipeline_layers=...`; "
        "otherwise use `pipeline_parallel_size=1`."
    )


def refuse_again(what: str) -> NoReturn:
    """Refuse manual optimization that calls the layers, or parts before them, again before a backward."""
    raise RuntimeError(
        f"{what} was called again before the `self.manual_backward(loss)` of its first call. Under a pipeline the "
        "layers run once for each `self.manual_backward`: use what the first call gave, let one call see both batches "
        "(`torch.cat`), call `self.manual_backward` for each loss before the layers run again, sample and score "
        "without gradients in a hook (`on_train_batch_start`, under `torch.no_grad()`), or use "
        "`pipeline_parallel_size=1`."
    )


def refuse_part(trunk: str, part: str, expected: int, where: str = "", *, again: bool = False) -> NoReturn:
    """Complain about a call of a part that is not on this stage, where layer ``expected`` comes next.

    Raises:
        CalledAgain: the step ``where``, which may be started over, has called all layers, and begins anew.
        RuntimeError: all else; ``again`` in manual optimization, after all layers.
    """
    if where in STARTS_OVER:
        raise CalledAgain
    if again:
        refuse_again(f"`{part}`")
    option = f'pipeline_placement={{"{part}": "all"}}'
    keep = f"keep it on every stage with `MegatronStrategy({option})`"
    if expected == 0:
        raise RuntimeError(
            f"`{part}` runs before the layers of `{trunk}`, but was placed on a later pipeline stage; {keep}. If those "
            "are not the layers that the step runs, name them with `pipeline_layers=...`."
        )
    raise RuntimeError(
        f"`{part}` was called when layer {expected} of `{trunk}` was expected, and it is not on this stage. If the "
        "step leaves layers out, or a later training step runs the model again and the first did not, it cannot run "
        "under a pipeline (use `pipeline_parallel_size=1`); "
        f"if `{part}` belongs there, {keep}."
    )
