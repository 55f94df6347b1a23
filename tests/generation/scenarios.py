"""Modules that generate, and where people let them: in steps, in a callback, after training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.huggingface import CONFIGS, LAYERS

Sizes = tuple[int, int, int]
# The last two layers read keys and values of others; hidden states are [2, rows, tokens, width].
_SHARED: dict[str, Any] = {
    **{**CONFIGS["gemma3"][2], "num_hidden_layers": LAYERS + 2, "num_kv_shared_layers": 2, "altup_num_inputs": 2},
    **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 4, "laurel_rank": 4},
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2 + 1),
    "activation_sparsity_pattern": [0.0] * (LAYERS + 2),
}
FAMILIES = {**CONFIGS, "gemma3n": ("Gemma3nTextConfig", "Gemma3nForCausalLM", _SHARED)}
GREEDY: dict[str, Any] = {"do_sample": False}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "recomputed": {"do_sample": False, "use_cache": False},
    "sampled": {"do_sample": True, "temperature": 1.5},
    "beams": {"do_sample": False, "num_beams": 3},
    "static": {"do_sample": False, "cache_implementation": "static"},
}
NEW = 6


def tiny(family: str) -> Any:
    """A model of a family, in float64, whose tokens vary: with large weights, and no end."""
    import transformers

    config, model, options = FAMILIES[family]
    torch.manual_seed(3)
    made = getattr(transformers, model)(getattr(transformers, config)(**options)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = 0
    return made


def prompts(rows: int = 4, length: int = 5) -> Tensor:
    """Token ids ``[rows, length]``."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(5))


class Talks(pl.LightningModule):
    """Generates in each step of evaluation, by each of some modes.

    Args:
        family: of the model.
        modes: names of `MODES`.
    """

    def __init__(self, family: str, modes: tuple[str, ...] = ("greedy",)) -> None:
        super().__init__()
        self.model = tiny(family)
        self.modes = modes
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        self.seen.append(self.tokens(batch)["greedy"])

    def test_step(self, batch: Tensor, index: int) -> None:
        self.seen.append(self.tokens(batch)["greedy"])
        self.log("mean", self.seen[-1].double().mean())

    def predict_step(self, batch: Tensor, index: int) -> dict[str, Tensor]:
        return self.tokens(batch)

    def tokens(self, batch: Tensor) -> dict[str, Tensor]:
        """By mode, what follows the prompts."""
        return {
            mode: self.model.generate(batch, max_new_tokens=NEW, **MODES[mode])[:, batch.shape[1] :]
            for mode in self.modes
        }

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Samples(pl.Callback):
    """Generates at the end of each epoch of validation."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module: Any = pl_module
        self.seen.append(module.tokens(prompts())["greedy"])


def replica_of(rank: int, sizes: Sizes) -> int:
    """Which replica a rank belongs to."""
    return rank // sizes[2] % sizes[1]


def _around(sizes: Sizes, options: Mapping[str, Any]) -> Sizes:
    """The sizes, context ranks counted with tensor ranks, which see the same batches."""
    pipeline, data, tensor = sizes
    return pipeline, data, tensor * int(options.get("context_parallel_size", 1))


def _loader(replica: int) -> Any:
    """Two batches of two prompts; every replica has its own."""
    return DataLoader(prompts(8)[4 * replica : 4 * replica + 4], batch_size=2)


def generated(
    info: RankInfo,
    family: str,
    sizes: Sizes | None,
    modes: tuple[str, ...],
    where: str = "predict",
    replica: int = 0,
    options: Mapping[str, Any] = {},
) -> list[Any]:
    """Tokens that a rank saw, batch by batch.

    Args:
        info: of the rank.
        family: of the model.
        sizes: of pipeline, replicas and tensor group; ``None`` for plain Lightning.
        modes: names of `MODES`.
        where: ``predict``, ``validate``, ``test``, or ``fit``: in steps, a callback and after it, with one replica.
        replica: with plain Lightning: whose prompts.
        options: further ones of the strategy.
    """
    pl.seed_everything(7, verbose=False)
    module, samples = Talks(family, modes), Samples()
    strategy: Any = "auto" if sizes is None else MegatronStrategy(*sizes, **options)
    trainer = make_trainer(info, strategy, max_epochs=1, num_sanity_val_steps=1, callbacks=[samples])
    loader = _loader(replica if sizes is None else replica_of(info.rank, _around(sizes, options)))
    if where == "predict":
        found: Any = trainer.predict(module, loader)
        return [{mode: tokens.tolist() for mode, tokens in batch.items()} for batch in found]
    if where == "fit":
        trainer.fit(module, loader, loader)
        module.eval()
        with torch.no_grad():
            after = module.tokens(prompts())["greedy"]
        return [[t.tolist() for t in module.seen], [t.tolist() for t in samples.seen], after.tolist()]
    run: Any = getattr(trainer, where)
    values = run(module, loader, verbose=False)
    return [[t.tolist() for t in module.seen], values]


def scheduled(info: RankInfo, options: dict[str, Any] | None) -> list[Any]:
    """Greedy tokens under a strategy with these options; ``None`` for plain Lightning."""
    pl.seed_everything(7, verbose=False)
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    found: Any = make_trainer(info, strategy).predict(Talks("llama"), _loader(0))
    return [batch["greedy"].tolist() for batch in found]
