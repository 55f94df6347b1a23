"""Balancing losses of Hugging Face mixtures, over all replicas' tokens, whichever stage routed them.

Their loss is a product of two means over tokens, made by one function of the modelling file from the logits of all
layers' routers. Over replicas that function is given the logits of all of them::

    replica 0   logits [T₀, E]  ┐                            ┌  ∂/∂ logits [T₀, E]
                                ├─▶ [T₀ + T₁, E] ─▶ loss ─▶  ┤                       summed over the replicas' losses
    replica 1   logits [T₁, E]  ┘                            └  ∂/∂ logits [T₁, E]

so that each has the loss of one process, and the mean of their gradients is its gradient. In micro-batches, a pass of
counts finds the logits of all of them before, with the gradient for each; see :mod:`of_parts`.

Under a pipeline the routers of earlier stages keep their logits on themselves, which the pipeline sends along, and the
last stage's model finds them among its outputs, as in one process.
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

from lightning_megatron.experts.balance.of_parts import PartsOfBatch, left_aside, with_gradient
from lightning_megatron.experts.exchange.gathering import gather_rows, gathered_rows
from lightning_megatron.mesh.messages.collectives import raw_all_gather
from lightning_megatron.mesh.parts.packages import module_of
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
    for name in (module_of(cls) for child in modules for cls in type(child).__mro__):
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
        here: whether the module has such models.
        called: whether such a function has been called in a step.
        parts: what it was given in micro-batches, or how it is left out in trials.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None, in_step: Callable[[], bool]) -> None:
        self._group, self._in_step, self._pauses = group, in_step, 0
        self._replaced, self.called, self.parts = Replacements(), False, PartsOfBatch()
        spaces = list(_spaces(list(module.modules())))
        self.here = bool(spaces)
        for space in spaces:
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
        if self.parts.running:
            return self._of_part(own, given, logits, mask)
        if self._group is not None:
            given.arguments["gate_logits"], mask = of_all(logits, mask, self._group)
            if "attention_mask" in given.arguments:
                given.arguments["attention_mask"] = mask
        return own(*given.args, **given.kwargs)

    def _of_part(
        self, own: Callable[..., Any], given: inspect.BoundArguments, logits: tuple[Tensor, ...], mask: Tensor | None
    ) -> Any:
        """The loss in a micro-batch, or in a trial."""
        if self.parts.aside:
            return left_aside(logits[-1])
        if self.parts.alone:
            return own(*given.args, **given.kwargs)
        if self.parts.notes:
            detached = tuple(layer.detach() for layer in logits)
            self.parts.note((own, given, detached, mask))
            given.arguments["gate_logits"] = detached
            return own(*given.args, **given.kwargs)
        (value, gradients), part, factor = self.parts.taken()
        for layer, gradient in zip(logits, gradients[part], strict=True):
            value = with_gradient(value, layer, (factor * gradient).view_as(layer).to(layer.device))
        return value

    def join(self, factors: list[float], group: dist.ProcessGroup | None) -> None:
        """Make the losses of the whole batch of what was noted; see :meth:`~.of_parts.PartsOfBatch.join`.

        Args:
            factors: of gradients, of each micro-batch.
            group: the replicas that have parts of the batch, all of which do this now; ``None`` for one.
        """
        self.parts.join(factors, functools.partial(_joined, group))


def _joined(group: dist.ProcessGroup | None, noted: list[Any]) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """The loss of all micro-batches' logits, and its gradients: of each micro-batch, for each layer."""
    own, given, logits, _ = noted[0]
    tokens = [each[2][0].reshape(-1, each[2][0].shape[-1]).shape[0] for each in noted]
    layers = [
        torch.cat([each[2][at].reshape(-1, each[2][at].shape[-1]) for each in noted]) for at in range(len(logits))
    ]
    masks = [each[3] for each in noted]
    mask = None
    if any(each is not None for each in masks):
        flat = [layers[0].new_ones(n) if m is None else m.reshape(-1) for n, m in zip(tokens, masks, strict=True)]
        mask = torch.cat([each.to(layers[0].device, torch.float32) for each in flat]).view(1, -1)
    with torch.enable_grad():
        leaves = tuple(layer.detach().requires_grad_() for layer in layers)
        given.arguments["gate_logits"] = leaves
        if group is not None:
            given.arguments["gate_logits"], mask = of_all(leaves, mask, group, own_gradient=True)
        if "attention_mask" in given.arguments:
            given.arguments["attention_mask"] = mask
        value = own(*given.args, **given.kwargs)
        gradients = torch.autograd.grad(value, leaves)
    return value.detach(), list(zip(*(gradient.split(tokens) for gradient in gradients), strict=True))


def of_all(
    logits: tuple[Tensor, ...], mask: Tensor | None, group: dist.ProcessGroup, *, own_gradient: bool = False
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Logits of all replicas' tokens, and what masks them; collective over the group, in the backward too.

    Args:
        logits: per layer [tokens, experts] or [..., experts], as many tokens in each.
        mask: of tokens, [batch, sequence]; ``None`` if none is masked here.
        group: the replicas, whose numbers of tokens may differ.
        own_gradient: whether the gradient of this replica's tokens is that of its own loss, for which nothing is sent;
            otherwise it is that of the sum of all replicas' losses.

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
    whole = tuple((_with_own if own_gradient else gather_rows)(layer, sizes, group) for layer in rows)
    if not any(masked):
        return whole, None
    own = torch.ones(tokens, device=device) if mask is None else mask.reshape(-1).to(device, torch.float32)
    return whole, gathered_rows(own, sizes, group).view(1, -1)


def _with_own(rows: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks, of which this rank's have their gradient."""
    blocks = list(gathered_rows(rows.detach(), sizes, group).split(sizes))
    blocks[group.rank()] = rows
    return torch.cat(blocks)


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
