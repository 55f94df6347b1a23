"""What a step may not do with the layers of a cut module: call them twice, or leave one out."""

from __future__ import annotations

from typing import NoReturn


def refuse_layer(trunk: str, index: int, expected: int, *, running: bool) -> NoReturn:
    """Complain about a call of layer ``index`` where no step runs, or where layer ``expected`` comes next."""
    if not running:
        raise RuntimeError(
            f"the layers of `{trunk}` were called outside of a training, validation, test or predict step. They are "
            "spread over the pipeline stages and run only inside a step; use `pipeline_parallel_size=1` for this."
        )
    if index < expected:
        last = expected - 1
        what = f"layer {index} of `{trunk}` was called again after layer {last}: the layers are called twice"
    else:
        what = f"layer {index} of `{trunk}` was called, but layer {expected} comes next: a layer was left out"
    raise RuntimeError(
        f"{what} in one step. A pipeline needs every layer exactly once, in order; change the step (no second forward, "
        "no generation, no layer dropping) or use `pipeline_parallel_size=1`."
    )


def refuse_end(trunk: str, called: int, layers: int) -> NoReturn:
    """Complain about a step that has ended after ``called`` of all layers."""
    said = f"called only {called} of the {layers}" if called else "did not call the"
    raise RuntimeError(
        f"the step {said} layers of `{trunk}`; under a pipeline every layer must be called exactly once, and layer "
        f"{called} was not called. If these are not the module's layers, name them with `pipeline_layers=...`; "
        "otherwise use `pipeline_parallel_size=1`."
    )


def refuse_part(trunk: str, part: str, expected: int) -> NoReturn:
    """Complain about a call of a part that is not on this stage, where layer ``expected`` comes next."""
    option = f'pipeline_placement={{"{part}": "all"}}'
    keep = f"keep it on every stage with `MegatronStrategy({option})`"
    if expected == 0:
        raise RuntimeError(f"`{part}` runs before the layers, but was placed on a later pipeline stage; {keep}.")
    raise RuntimeError(
        f"`{part}` was called when layer {expected} of `{trunk}` was expected, and it is not on this stage. If the "
        "step leaves layers out, or runs the model again (text generation: take the weights by "
        "`strategy.full_state_dict()`), it cannot run under a pipeline (use `pipeline_parallel_size=1`); "
        f"if `{part}` belongs there, {keep}."
    )
