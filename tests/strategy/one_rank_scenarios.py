"""Hooks that call the model on global rank 0 only, as people write them to look at samples."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor

from lightning_megatron import MegatronStrategy
from tests.experts.expert_scenarios import Data, built
from tests.harness import RankInfo
from tests.parallelize.models import hugging_face
from tests.parity.train import make_trainer
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.tasks import TokenTask

TOKENS = torch.arange(8).view(1, 8)
Look = Callable[[Any, Any], Any]


def _logits(module: Any) -> Tensor:
    logits: Tensor = module.net(TOKENS)
    return logits


def _in_evaluation(trainer: Any, module: Any) -> Any:
    """The model in evaluation, on one rank."""
    if trainer.is_global_zero:
        module.eval()
        with torch.no_grad():
            found = _logits(module).log_softmax(-1).sum(1)
        module.train()
        return found
    return None


def _layer_by_keyword(trainer: Any, module: Any) -> Any:
    """One layer, whose mask is an argument by name."""
    if trainer.is_global_zero:
        x = module.net.token_embedding(TOKENS)
        return module.net.layers[1](x, bias=torch.zeros(8, 8, dtype=x.dtype)).detach()
    return None


def _twice(trainer: Any, module: Any) -> Any:
    """The model two times, and a weight between."""
    if trainer.is_global_zero:
        with torch.inference_mode():
            first = _logits(module)
            return first.argmax(-1), module.net.token_embedding.weight.norm(), _logits(module).argmax(-1)
    return None


def _by_all(trainer: Any, module: Any) -> Any:
    """The model on all ranks, and on one what is done with it."""
    with torch.no_grad():
        logits = _logits(module)
    return logits.softmax(-1).amax(-1) if trainer.is_global_zero else None


def _backward(trainer: Any, module: Any) -> Any:
    if trainer.is_global_zero:
        _logits(module).sum().backward()


def _copy(trainer: Any, module: Any) -> Any:
    copied = deepcopy(module.net)
    if trainer.is_global_zero:
        copied(TOKENS)


def _others(trainer: Any, module: Any) -> Any:
    module.net.layers[0 if trainer.is_global_zero else 1](module.net.token_embedding(TOKENS).detach())


def _cached(trainer: Any, module: Any) -> Any:
    if trainer.is_global_zero:
        with torch.no_grad():
            return module.net.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    return None


def _uncached(trainer: Any, module: Any) -> Any:
    """Decoding without a cache."""
    if trainer.is_global_zero:
        with torch.no_grad():
            return module.net.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0, use_cache=False)
    return None


def _alone_and_together(trainer: Any, module: Any) -> Any:
    """The model with samples of one rank's own, and by all ranks with others."""
    with torch.no_grad():
        own = module.net(TOKENS.flip(1)).argmax(-1) if trainer.is_global_zero else None
        return own, _logits(module).softmax(-1).amax(-1)


def _own_ends(trainer: Any, module: Any) -> Any:
    """Generations by all ranks, each with its own criteria and scores; the first one's hold."""
    first, given = trainer.is_global_zero, {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ends: dict[str, Any] = {"stopping_criteria": [lambda ids, scores: ids.shape[1] > 9 + 2 * (not first)]}
    least: dict[str, Any] = {"logits_processor": [lambda ids, scores: -scores if first else 2 * scores]}
    own: list[dict[str, Any]] = [ends, ends if first else {}, {} if first else ends, least, least if first else {}]
    with torch.no_grad():
        found = [module.net.generate(TOKENS, **given, **more) for more in (*own, {} if first else least)]
    return found


def _ends_alone(trainer: Any, module: Any) -> Any:
    """A generation by one rank, without a cache, with a criterion of its own."""
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": False}
    if trainer.is_global_zero:
        with torch.no_grad():
            return module.net.generate(TOKENS, stopping_criteria=[lambda ids, _: ids.shape[1] > 9], **given)
    return None


def _generates_elsewhere(trainer: Any, module: Any) -> Any:
    with torch.no_grad():
        if trainer.is_global_zero:
            module.net.generate(TOKENS, max_new_tokens=3, use_cache=False)
        else:
            module.net(TOKENS)


def _mixture(trainer: Any, module: Any) -> Any:
    """A layer of experts, on one rank."""
    if trainer.is_global_zero:
        with torch.no_grad():
            return module.layers[2](module.embed(TOKENS[:, :6]))
    return None


LOOKS: dict[str, Look] = {
    look.__name__.removeprefix("_"): look
    for look in (
        _in_evaluation,
        _layer_by_keyword,
        _twice,
        _by_all,
        _backward,
        _copy,
        _others,
        _cached,
        _uncached,
        _alone_and_together,
        _own_ends,
        _ends_alone,
        _generates_elsewhere,
        _mixture,
    )
}


_GENERATE = ("cached", "uncached", "own_ends", "ends_alone", "generates_elsewhere")


class Looks(Callback):
    """Looks at the model when an epoch ends.

    Args:
        name: how.
    """

    def __init__(self, name: str) -> None:
        self.name, self.found = name, []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.found.append((LOOKS[self.name])(trainer, pl_module))
        if trainer.is_global_zero:
            self.last = self.name


class Nets(TokenTask):
    """A network, or a Hugging Face model."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(batch[0])
        return F.cross_entropy(getattr(logits, "logits", logits).flatten(0, 1), batch[1].flatten())


def fit(info: RankInfo, name: str, arguments: dict[str, Any] | None) -> Any:
    """Trains two epochs, looking behind each; what was found on this rank, and the losses."""
    torch.manual_seed(7)
    looks = Looks(name)
    module: Any = (
        built("selected")
        if name == "mixture"
        else Nets(hugging_face("llama") if name in _GENERATE else LearnedPositions())
    )
    data = {"datamodule": Data("selected")} if name == "mixture" else {}
    strategy: Any = "auto" if arguments is None else MegatronStrategy(**arguments)
    trainer = make_trainer(info, strategy, max_epochs=2, callbacks=[looks])
    trainer.fit(module, **data)
    return looks.found, {key: float(value) for key, value in trainer.callback_metrics.items()}
