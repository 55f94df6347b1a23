"""``MegatronStrategy.generate``: lists of prompts, divided over the replicas, outside of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_megatron.mesh.messages import objects
from lightning_megatron.pipeline.repeated.groups import Groups
from lightning_megatron.pipeline.repeated.model_calls import ModelCalls
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.generation.requests import Requests


def continue_prompts(
    strategy: Any,
    prompts: Sequence[Any],
    *,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    max_new_tokens: int = 64,
    batch_size: int = 8,
    groups: int | str = "auto",
    prefill_batch_size: int | None = None,
    seed: int = 0,
    **options: Any,
) -> list[Any]:
    """Continue each prompt, on all ranks together; every rank gets all of them.

    Each batch of prompts has the tokens that the model's ``generate`` gives in one process after
    ``torch.manual_seed(seed + number of the batch)``, with padding on the left. The global random numbers are left as
    they were.

    Args:
        strategy: whose module has been set up by ``fit``, ``validate``, ``test`` or ``predict``.
        prompts: texts, with a ``tokenizer``, or lists of token ids.
        model: which one of the module's to ask; by default the first that has Hugging Face's ``generate``.
        tokenizer: Hugging Face's.
        max_new_tokens: most tokens that follow a prompt.
        batch_size: prompts at a time, of each replica.
        groups: how many batches a pipeline has under way at once, so that its stages do not wait for each other;
            by default as many as there are stages. Each keeps a cache of its own. Tokens do not depend on it.
        prefill_batch_size: prompts at a time before the first token of a batch, fewer than in it, so that stages wait
            less for the first of them; see :mod:`.prefill`.
        seed: of random numbers.
        options: of the model's ``generate``.

    Returns:
        Texts with a tokenizer, else lists of token ids up to the end of the text; in the order of the prompts.

    Raises:
        ValueError: prompts or options that do not fit; on every rank, before anything is computed.
    """
    run, mesh, device = strategy.run, strategy.mesh, strategy.root_device
    layout = mesh.layout
    asked: Any = model or _find(run.module)
    _check(strategy, prompts, tokenizer)
    places = groups_of(groups, layout.pipeline)
    ids = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    options = {**options, "max_new_tokens": max_new_tokens}
    requests = Requests(asked, ids, batch_size, seed, options, layout.pipeline, tokenizer, prefill_batch_size)
    found: dict[int, list[int]] = {}
    run.engine.model_gradients.finish_gather()
    streamed = run.assembled.streamed.windows.step() if run.assembled.streamed is not None else nullcontext()
    with evaluated(asked), _forked(device), torch.no_grad(), strategy.precision_plugin.predict_step_context(), streamed:
        batches = range(layout.coordinates(mesh.rank).data, len(requests), layout.data)
        tasks = [partial(_continue, asked, requests, batch, device, found) for batch in batches]
        run_tasks(run.module, tasks, places)
    for others in objects.gather(found, mesh.group("data_parallel")):
        found |= others
    lists = [found[number] for number in range(len(ids))]
    return lists if tokenizer is None else [tokenizer.decode(each, skip_special_tokens=True) for each in lists]


def _continue(model: Any, requests: Requests, batch: int, device: torch.device, found: dict[int, list[int]]) -> None:
    found |= requests.found(batch, model.generate(**requests.prefilled(model, batch, device)))


def groups_of(given: int | str, stages: int) -> int:
    """How many batches are under way at once.

    Raises:
        ValueError: it is no number of them.
    """
    if given == "auto":
        return stages
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(f"`groups={given!r}` must be 'auto' or the number of batches in flight, at least 1.")
    return given if stages > 1 else 1


def prepare_tasks(module: nn.Module, groups: int) -> None:
    """Make what :func:`run_tasks` needs inside of a step; collective over the pipeline, and not inside of one."""
    stage = Stage.of(module)
    if groups > 1 and stage is not None:
        ModelCalls.of(module, stage).prepare(groups)


def run_tasks(module: nn.Module, tasks: Sequence[Callable[[], Any]], groups: int) -> Groups | None:
    """Run tasks that generate, up to ``groups`` of them at once, equal on all ranks of the pipeline.

    Returns:
        How busy this stage was; ``None`` where tasks ran one after the other.
    """
    stage, groups = Stage.of(module), min(groups, len(tasks))
    if groups < 2 or stage is None:
        for task in tasks:
            task()
        return None
    if not stage.repeats:
        prepare_tasks(module, groups)
    return ModelCalls.of(module, stage).together(tasks, groups)


def _find(module: nn.Module) -> Any:
    """The outermost model that generates.

    Raises:
        ValueError: there is none.
    """
    for child in module.modules():
        if callable(getattr(child, "generate", None)) and hasattr(child, "generation_config"):
            return child
    raise ValueError(
        f"`{type(module).__name__}` has no model with Hugging Face's `generate`; call your own loop on every "
        "rank, under `torch.no_grad()`."
    )


def _check(strategy: Any, prompts: Sequence[Any], tokenizer: Any) -> None:
    layout, options = strategy.mesh.layout, strategy.options
    if isinstance(prompts, str):
        raise ValueError("`prompts` must be a list; put the text into one.")
    if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("prompts that are texts need a `tokenizer=`; without one, give lists of token ids.")
    if layout.context > 1:
        raise ValueError("`context_parallel_size` cannot split single tokens; generate with `context_parallel_size=1`.")
    if layout.data > 1 and (options.weight_sharding or options.expert_ranks > 1):
        name = "weight_sharding=True" if options.weight_sharding else "expert_parallel_size"
        raise ValueError(
            f"`{name}` makes replicas take part in each other's layers, and they generate different numbers of tokens; "
            "generate without it, in a run of its own."
        )


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """The model in evaluation, and then each of its modules as it was."""
    modes = [(child, child.training) for child in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


def _forked(device: torch.device) -> Any:
    """Around what draws random numbers; afterwards the global generators are where they were."""
    return torch.random.fork_rng([device.index or 0] if device.type == "cuda" else [])
