"""Balancing losses of Hugging Face's mixtures, of all replicas' tokens, whichever stage routed them.

Their loss is a product of two means over tokens, made by one function of the modelling file from the logits of all
layers' routers. Over replicas that function is given the logits of all of them::

    replica 0   logits [T₀, E]  ┐                            ┌  ∂/∂ logits [T₀, E]
                                ├─▶ [T₀ + T₁, E] ─▶ loss ─▶  ┤                       summed over the replicas' losses
    replica 1   logits [T₁, E]  ┘                            └  ∂/∂ logits [T₁, E]

so that each has the loss of one process, and the mean of their gradients is its gradient. Under a pipeline the routers
of earlier stages keep their logits on themselves, which the pipeline sends along, and the last stage's model finds them
among its outputs, as in one process.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.experts.exchange.gathering import gather_rows, gathered_rows
from lightning_megatron.mesh.messages.collectives import raw_all_gather
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.parallelize.reading.kinds import hugging_face_models, is_hugging_face

_FUNCTION = "load_balancing_loss_func"
_KEPT = "router_logits_of_step"
_COLLECTS = "transformers.utils.output_capturing"


def balances(module: nn.Module) -> list[str]:
    """Names of the Hugging Face models that add a balancing loss to theirs."""
    return [
        name
        for name, child in module.named_modules()
        if getattr(getattr(child, "config", None), "output_router_logits", False) is True and is_hugging_face(child)
    ]


def collect_once(module: nn.Module) -> None:
    """Let Hugging Face's mixtures set up now what collects their routers' logits, and not in the first step, of which
    trials would put back a part."""
    install = getattr(sys.modules.get(_COLLECTS), "maybe_install_capturing_hooks", None)
    for part in module.modules():
        if install is not None and "router_logits" in (getattr(part, "_can_record_outputs", None) or {}):
            install(part)


def is_known(model: nn.Module) -> bool:
    """Whether the balancing loss of a Hugging Face model is made by a function that is known here."""
    return any(True for _ in _spaces([model]))


def _spaces(modules: list[nn.Module]) -> Iterator[Any]:
    """Python modules with a function that makes balancing losses of the routers' logits."""
    seen = set()
    for name in (cls.__module__ for child in modules for cls in type(child).__mro__):
        space = sys.modules.get(name)
        function = vars(space).get(_FUNCTION) if space is not None and name not in seen else None
        seen.add(name)
        if function is not None and list(inspect.signature(function).parameters)[:1] == ["gate_logits"]:
            yield space


class BalancingLosses:
    """Gives the functions that make balancing losses the tokens of all replicas, for one run.

    Args:
        module: the user's.
        group: the replicas; ``None`` for one, or if each replica's own loss is meant.
        in_step: whether a step is running, in which all replicas take part.

    Attributes:
        called: whether such a function has been called in a step.
        left_out: whether they are left out of gradients, for a trial of what else the loss is made of.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None, in_step: Callable[[], bool]) -> None:
        self._group, self._in_step, self._pauses = group, in_step, 0
        self._replaced, self.called, self.left_out = Replacements(), False, False
        for space in _spaces(list(module.modules())):
            own = getattr(space, _FUNCTION)
            self._replaced.put(space, _FUNCTION, functools.wraps(own)(functools.partial(self._whole, own)))
        for model in hugging_face_models(module).values() if group is not None else ():
            if hasattr(model, "generate"):
                self._replaced.call(model, "generate", functools.partial(self._alone, model.generate))

    def close(self) -> None:
        """Give the functions back."""
        self._replaced.take_back()

    def _alone(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Generate; replicas do so in as many steps as each of them likes."""
        self._pauses += 1
        try:
            return own(*args, **kwargs)
        finally:
            self._pauses -= 1

    @torch.compiler.disable
    def _whole(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(own).bind(*args, **kwargs)
        given.apply_defaults()
        logits, mask = given.arguments["gate_logits"], given.arguments.get("attention_mask")
        if not isinstance(logits, tuple) or not logits or self._pauses or not self._in_step():
            return own(*args, **kwargs)
        self.called = True
        if self.left_out:
            given.arguments["gate_logits"] = tuple(layer.detach() for layer in logits)
        elif self._group is not None:
            given.arguments["gate_logits"], mask = of_all(logits, mask, self._group)
            if "attention_mask" in given.arguments:
                given.arguments["attention_mask"] = mask
        return own(*given.args, **given.kwargs)


def of_all(
    logits: tuple[Tensor, ...], mask: Tensor | None, group: dist.ProcessGroup
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Logits of all replicas' tokens, and what masks them; collective over the group, in the backward too.

    Args:
        logits: per layer [tokens, experts] or [..., experts], as many tokens in each.
        mask: of tokens, [batch, sequence]; ``None`` if none is masked here.
        group: the replicas, whose numbers of tokens may differ.

    Returns:
        Per layer [tokens of all, experts]; and the mask [1, tokens of all], ``None`` if none of them has one.

    Example:
        2 replicas with 3 and 2 tokens: logits [3, E] and [2, E] give [5, E] on both; a mask on one of them counts all
        tokens of the other.
    """
    rows = [layer.reshape(-1, layer.shape[-1]) for layer in logits]
    tokens, device = rows[0].shape[0], rows[0].device
    told = torch.tensor([[tokens, mask is not None]], device=device)
    sizes, masked = zip(*raw_all_gather(told, 0, group).tolist(), strict=True)
    whole = tuple(gather_rows(layer, sizes, group) for layer in rows)
    if not any(masked):
        return whole, None
    own = torch.ones(tokens, device=device) if mask is None else mask.reshape(-1).to(device, torch.float32)
    return whole, gathered_rows(own, sizes, group).view(1, -1)


class KeptLogits:
    """Lets the last stage's models find the logits of routers on earlier stages among their outputs.

    Args:
        module: the user's, whole.

    Raises:
        ValueError: a model collects logits in a way that is not known here.
    """

    def __init__(self, module: nn.Module) -> None:
        self._handles: list[RemovableHandle] = []
        self._routers: list[nn.Module] = []
        wanted = balances(module)
        for name, part in module.named_modules():
            if name not in wanted:
                if "router_logits" in (getattr(part, "_can_record_outputs", None) or {}):
                    self._handles.append(part.register_forward_hook(functools.partial(_refused, name)))
                continue
            for router, index in _routers(part, name):
                if router not in self._routers:
                    self._routers.append(router)
                    self._handles.append(router.register_forward_hook(functools.partial(_keep, index)))
                    setattr(router, _KEPT, None)
            self._handles.append(part.register_forward_hook(_completed))

    def close(self) -> None:
        """Take the logits and hooks off the modules."""
        for handle in self._handles:
            handle.remove()
        for router in self._routers:
            vars(router).pop(_KEPT, None)


def _keep(index: int, router: nn.Module, args: Any, output: Any) -> None:
    setattr(router, _KEPT, output[index] if isinstance(output, tuple) else output)


def _refused(name: str, model: nn.Module, args: Any, output: Any) -> None:
    if getattr(output, "router_logits", None):
        raise ValueError(
            f"`{name or type(model).__name__}` was called with `output_router_logits=True`, which under a pipeline "
            "must be known before the first step: set `config.output_router_logits=True`."
        )


def _completed(model: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(getattr(output, "router_logits", None), tuple):
        output["router_logits"] = tuple(getattr(router, _KEPT) for router, _ in _routers(model, ""))
    return output


def _routers(model: nn.Module, name: str) -> list[tuple[nn.Module, int]]:
    """The modules whose outputs a Hugging Face model collects as logits, and the places of these in them."""
    for part in model.modules():
        recorder = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        if recorder is not None and hasattr(recorder, "target_class") and recorder.target_class is not None:
            suffix = recorder.layer_name or ""
            found = [
                (child, recorder.index)
                for path, child in part.named_modules()
                if isinstance(child, recorder.target_class) and path.endswith(suffix)
            ]
            if found:
                return found
    raise ValueError(
        f"`{name or type(model).__name__}` has `config.output_router_logits=True` and collects them from the layers of "
        "all stages in a way that is not known here. Set it to False, or use `pipeline_parallel_size=1`."
    )
