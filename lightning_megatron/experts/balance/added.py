"""Balancing losses that a run adds to the loss of the user's step (``expert_balance="loss"``).

Where the module is built of :class:`~lightning_megatron.layers.MoE`, it is their :func:`router_losses`; where it has
Hugging Face's mixtures, the ``aux_loss`` of their outputs, which they compute if asked for routers' logits. Both are
of the whole batch in any layout; see :mod:`whole_batch` and :mod:`balancing`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.experts.balance.balancing import is_known
from lightning_megatron.layers import MoE, router_losses
from lightning_megatron.layers.mixture import moe
from lightning_megatron.mesh.autograd import graph_behind
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.parallelize.reading.kinds import hugging_face_models

_LOGITS, _FACTOR = "output_router_logits", "router_aux_loss_coef"


@dataclass(frozen=True)
class AddedBalance:
    """Settings of the losses to add.

    Attributes:
        factor: of the loss; ``None`` for 0.01, or what a model's configuration says.
        scope: of which tokens it is: "batch" or "sequence"; see :func:`~lightning_megatron.layers.router_losses`.
    """

    factor: float | None = None
    scope: str = "batch"


class AddedLosses:
    """Adds balancing losses to what a step returns, for one run.

    Args:
        module: the user's.
        asked: what is to be added.

    Raises:
        ValueError: there is no mixture whose balancing loss is known.
    """

    def __init__(self, module: nn.Module, asked: AddedBalance) -> None:
        self._module, self._asked, self._replaced = module, asked, Replacements()
        self._own = any(isinstance(child, MoE) for child in module.modules())
        self._made: list[tuple[Tensor, float]] = []
        self._theirs = False
        if self._own:
            self._replaced.put(moe, "losses_of", functools.partial(self._losses_of, moe.losses_of))
        self._handles: list[RemovableHandle] = []
        known = balanced_models(module)
        if asked.scope == "sequence" and known:
            raise ValueError(
                f"`expert_balance={{'loss': ..., 'scope': 'sequence'}}` is not a loss that {_named(known)} computes; "
                "leave `scope` out."
            )
        for model in known.values():
            if getattr(model.config, _LOGITS) is not True:
                self._replaced.put(model.config, _LOGITS, True)
            if asked.factor is not None:  # it adds the loss itself where it is given labels
                self._replaced.put(model, _FACTOR, asked.factor)
            self._handles.append(model.register_forward_hook(self._note))
        if not self._own and not known:
            raise ValueError(
                "`expert_balance='loss'` found no mixture of experts whose balancing loss is known: neither "
                "`lightning_megatron.layers.MoE`, nor a Hugging Face model with `config.output_router_logits`. Add a "
                "loss of your own in `training_step`, or leave it out."
            )

    def close(self) -> None:
        """Leave the models as they were."""
        self._replaced.take_back()
        for handle in self._handles:
            handle.remove()

    def step(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The user's step with the losses added to what it returns: a loss, or a mapping with one."""

        def balanced(batch: Any) -> Any:
            self._made.clear()
            self._theirs = False
            output = call(batch)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if not isinstance(loss, Tensor):
                return output
            total = self._added(loss)
            return {**output, "loss": total} if isinstance(output, Mapping) else total

        return balanced

    def _losses_of(self, own: Callable[..., Tensor], mixture: MoE, balance: float, z: float, scope: str) -> Tensor:
        """Note whether a step asks for a balancing loss."""
        self._theirs |= bool(balance)
        return own(mixture, balance, z, scope)

    def _note(self, model: Any, args: Any, output: Any) -> None:
        made = getattr(output, "aux_loss", None)
        if isinstance(made, Tensor):
            factor = self._asked.factor
            self._made.append((made, getattr(model.config, _FACTOR, 0.01) if factor is None else factor))

    def _added(self, loss: Tensor) -> Tensor:
        if self._own:
            if self._theirs:
                raise ValueError(
                    "`training_step` makes a balancing loss by `router_losses` itself, to which "
                    "`expert_balance='loss'` would add another: leave one of them out."
                )
            factor = 0.01 if self._asked.factor is None else self._asked.factor
            loss = loss + router_losses(self._module, balance=factor, scope=self._asked.scope)
        elif not self._made:
            raise ValueError(
                "`expert_balance='loss'` adds the `aux_loss` of the outputs of Hugging Face models, but "
                "`training_step` calls none that makes one: call the model with its head (`...ForCausalLM`), not what "
                "is inside of it."
            )
        for made, factor in self._made:
            behind = set() if loss.grad_fn is None else set(graph_behind([loss.grad_fn]))
            if made.grad_fn not in behind:  # a model that is given labels has added it already
                loss = loss + factor * made.to(loss.device)
        return loss


def balanced_models(module: nn.Module) -> dict[str, Any]:
    """The Hugging Face models whose outputs have an ``aux_loss`` if asked for routers' logits, by name."""
    return {
        name: cast(Any, model)
        for name, model in hugging_face_models(module).items()
        if hasattr(getattr(model, "config", None), _LOGITS) and hasattr(model, "lm_head") and is_known(model)
    }


def _named(models: Mapping[str, Any]) -> str:
    return " and ".join(f"`{name or type(model).__name__}`" for name, model in models.items())
