"""Mixtures of experts as people write them, trained in one process and with their experts shared out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers import router_losses
from lightning_megatron.models import Decoder, DecoderConfig
from tests.experts import strangers
from tests.experts.families import DEEP, FAMILIES, FURTHER, UNSPLIT, WIDTH
from tests.experts.planned import PLANNED
from tests.experts.strangers import Stacked
from tests.harness import RankInfo
from tests.parity.train import make_trainer

VOCABULARY, TOKENS, EXPERTS = 32, 6, 4


class Mixture(nn.Module):
    """A residual layer with a router, and two experts for each token."""

    def __init__(self, experts: nn.Module | None = None, count: int = EXPERTS) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, count)
        self.experts = Stacked(count) if experts is None else experts

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x).flatten(0, 1)
        weights, index = self.router(hidden).softmax(-1).topk(2)
        return x + self.experts(hidden, index, weights / weights.sum(-1, keepdim=True)).view_as(x)


class Reading(Mixture):
    """Looks at the weights of experts beside calling them."""

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.experts.up, self.experts.down
        return super().forward(x) + 0.1 * x.sum(-1, keepdim=True) * up[3].sum() + 0.1 * x * down.square().mean()


class Words(LightningModule):
    """A language model of four such layers."""

    def __init__(self, layers: Any = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList([Mixture() for _ in range(4)] if layers is None else layers)

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class Starved(Words):
    """All tokens go to the first two experts."""

    def __init__(self, layers: Any = None) -> None:
        super().__init__(layers)
        for layer in self.layers:
            layer.router.bias.data = torch.tensor([5.0, 4.0, -50.0, -50.0])  # type: ignore[union-attr]


class Uneven(Words):
    """Layers of four and of two experts, and one without."""

    def __init__(self) -> None:
        super().__init__([Mixture(), Mixture(count=2), nn.Linear(WIDTH, WIDTH), Mixture()])


class Watched(Words):
    """Looks at experts in its step and in hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalty = sum(p.abs().sum() for name, p in self.named_parameters() if "experts" in name)
        return self.loss(batch) + 0.01 * penalty

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.layers[0].experts.up.grad.div_(self.layers[0].experts.up.grad.norm())

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.layers[1].experts.up.div_(self.layers[1].experts.up.norm(dim=0, keepdim=True))


class SomeSamples(Words):
    """Samples of one kind learn by the first layers, and others, which not every replica has, by all of them.

    Args:
        layers: of the model.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        early = x = self.embed(batch[0])
        for number, layer in enumerate(self.layers):
            x = layer(x)
            early = x if number == 1 else early
        late = (batch[0][:, 0] == 7).nonzero()[:, 0]  # one in each batch
        losses = F.cross_entropy(self.head(early).mT, batch[1], reduction="none").mean(1)
        if len(late):
            more = F.cross_entropy(self.head(x[late]).mT, batch[1][late], reduction="none").mean(1)
            losses = losses.index_add(0, late, more)
        return losses.mean()


class LeftOut(Words):
    """Leaves some batches out, which not every replica has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return None if batch[0][0, 0] % 2 else self.loss(batch)


class Penalised(Words):
    """Adds gradients of its loss to it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = given = self.embed(batch[0]).detach().requires_grad_()
        for layer in self.layers:
            x = layer(x)
        losses = F.cross_entropy(self.head(x).mT, batch[1], reduction="none").mean(1)
        (gradient,) = torch.autograd.grad(losses.sum(), given, create_graph=True)
        return (losses + gradient.square().sum((1, 2))).mean()


class Strange(Words):
    """Layers with a list of experts.

    Args:
        name: of the kind of mixture.
        block: the kind of layer around it.
    """

    def __init__(self, name: str, block: Any = strangers.Block) -> None:
        super().__init__([block(strangers.KINDS[name]) for _ in range(4)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strangers.KEPT.clear()
        loss = self.loss(batch)
        kept = [*strangers.KEPT, *(layer.mixture.balance for layer in self.layers if hasattr(layer.mixture, "balance"))]
        for logits in (layer.mixture.logits for layer in self.layers if hasattr(layer.mixture, "logits")):
            shares = logits.softmax(-1)
            kept.append((F.one_hot(shares.argmax(-1), EXPERTS).to(shares.dtype).mean(0) * shares.mean(0)).sum())
        return loss + 0.01 * torch.stack(kept).sum() if kept else loss


class Switching(Words):
    """Its routers convert themselves to 32 bits when they first run, as those of Switch Transformers do."""

    def __init__(self) -> None:
        super().__init__([strangers.Block(strangers.Converting) for _ in range(4)])


class DropIn(Words):
    """Built of this package's mixtures, with their losses."""

    kinds = strangers.DROP_IN
    scope = "batch"

    def __init__(self) -> None:
        super().__init__([strangers.Block(kind) for kind in self.kinds])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + router_losses(self, balance=0.3, z=0.01, scope=self.scope)


class Summing(DropIn):
    """With balancing losses, and no others."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + router_losses(self, balance=0.3, scope=self.scope)


class HookedWeights(DropIn):
    """Divides gradients of routers and of the embedding by something of their norms, which is no sum over samples."""

    def on_fit_start(self) -> None:
        routers = [weight for name, weight in self.named_parameters() if "router" in name]
        assert routers
        for weight in [self.embed.weight, *routers]:
            weight.register_hook(lambda gradient: gradient / (0.1 + gradient.norm()))


class Multiplied(DropIn):
    """Multiplies its loss by what balances the experts, so that the whole batch's is not a sum."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + router_losses(self, balance=0.3))


class Masked(DropIn):
    """Some of its targets are ignored, so that micro-batches count by their targets; logs its balance."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.drop(self.embed(batch[0]))
        for layer in self.layers:
            x = layer(x)
        balance = router_losses(self, balance=0.3)
        self.log("balance", balance, sync_dist=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten()) + balance


class Late(DropIn):
    """Balances its experts from the second step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss + router_losses(self, balance=0.3) if self.trainer.global_step else loss


class LateUnread(DropIn):
    """The same, decided in a way that is not read in its code."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss + router_losses(self, balance=0.3) if batch_idx not in {0} else loss


class SummingBySequence(Summing):
    """With those of each sequence."""

    scope = "sequence"


class Unbalanced(DropIn):
    """Without losses of its routers; logs its own loss in a dictionary."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return {"loss": self.loss(batch), "more": batch_idx}


class BySequence(DropIn):
    """With balancing losses of each sequence."""

    scope = "sequence"


class Tight(DropIn):
    """Drops tokens."""

    kinds = strangers.TIGHT


class Biased(Words):
    """Balanced by biases."""

    def __init__(self) -> None:
        super().__init__([strangers.Block(kind) for kind in strangers.BIASED])


class Reference(Words):
    """The reference decoder, with a pyramid of experts, built when training starts."""

    def __init__(self) -> None:
        super().__init__([])
        del self.embed, self.head, self.layers
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            sizes = {"vocabulary": VOCABULARY, "hidden": WIDTH, "layers": 4, "heads": 2}
            self.net = Decoder(DecoderConfig(**sizes, experts=(2, 4), top_k=2))

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(batch[0]).flatten(0, 1)
        return F.cross_entropy(logits, batch[1].flatten()) + router_losses(self, balance=0.01)


class Moving(Words):
    """Moves biases in a hook, by what layers have kept.

    Args:
        name: of the kind of layer.
        gathers: whether it adds up the counts of all replicas.
    """

    def __init__(self, name: str, gathers: bool) -> None:
        super().__init__([strangers.Block(strangers.BIASES[name]) for _ in range(4)])
        self.gathers = gathers

    def on_train_batch_end(self, *_: Any) -> None:
        for layer in self.layers:
            counts = getattr(layer.mixture, "counts", None)
            if counts is not None:
                with torch.no_grad():
                    if self.gathers:
                        counts.copy_(self.trainer.strategy.reduce(counts.clone(), reduce_op="sum"))
                    layer.mixture.move(counts)  # type: ignore[union-attr, operator]
                    counts.zero_()


class Flat(Words):
    """Gives a mixture with a capacity tokens in one dim, of which the first is not that of samples."""

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0]).transpose(0, 1)
        return F.cross_entropy(self.head(self.layers[0](x)).transpose(0, 1).flatten(0, 1), batch[1].flatten())

    def __init__(self) -> None:
        super().__init__([strangers.Block(kind) for kind in strangers.TIGHT])


class Jittery(Words):
    """With noise on what routers see."""

    def __init__(self) -> None:
        super().__init__([strangers.Block(kind) for kind in strangers.NOISY])


class Gathered(Strange):
    """Makes a balancing loss of the routers' logits of all replicas."""

    def __init__(self) -> None:
        super().__init__("logits")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for layer in self.layers:
            logits = self.all_gather(layer.mixture.logits, sync_grads=True)  # type: ignore[union-attr]
            shares = logits.reshape(-1, EXPERTS).softmax(-1)
            chosen = F.one_hot(shares.argmax(-1), EXPERTS).to(shares.dtype)
            loss = loss + 0.01 * (chosen.mean(0) * shares.mean(0)).sum()
        return loss


class BuiltLater(LightningModule):
    """Builds its layers on the meta device."""

    training_step, validation_step = Words.training_step, Words.validation_step
    loss, configure_optimizers = Words.loss, Words.configure_optimizers

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            with torch.device("meta"):
                whole = Words([Later() for _ in range(4)])
            self.embed, self.head, self.layers = whole.embed, whole.head, whole.layers


class LaterExperts(Stacked):
    """Stacked experts that can be filled once they are on a device."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.2)


class Later(Mixture):
    """A mixture of such experts."""

    def __init__(self) -> None:
        super().__init__(LaterExperts())


class Pretrained(LightningModule):
    """A small Hugging Face model of two layers.

    Args:
        family: key of `FAMILIES` or `FURTHER`.
        more: of its configuration.
    """

    def __init__(self, family: str, **more: Any) -> None:
        super().__init__()
        import transformers

        name, own = {**FAMILIES, **FURTHER, **UNSPLIT}[family]
        sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = getattr(transformers, f"{family}Config")(**{**sizes, **own, **more}, pad_token_id=0, use_cache=False)
        kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.net = getattr(transformers, name)._from_config(config, **kinds)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        further = {"decoder_input_ids": batch[0].flip(1)} if self.net.config.is_encoder_decoder else {}
        logits = self.net(input_ids=batch[0], **further).logits
        return F.cross_entropy(logits.double().flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)


class Large(Pretrained):
    """One whose weights are so large that experts matter, and whose steps are as long as gradients.

    Args:
        family: key of `FAMILIES` or `FURTHER`.
        deep: whether it has four layers, for two stages, and not two.
    """

    def __init__(self, family: str, *, deep: bool = False) -> None:
        super().__init__(family, **({"num_hidden_layers": 4, **DEEP.get(family, {})} if deep else {}))
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.25)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


class Balanced(Pretrained):
    """One that adds a balancing loss of its own, and masks some of its tokens.

    Args:
        family: key of `FAMILIES`; or ``passed`` to ask for the loss in the call only, or ``rewritten`` to make it of
            the logits anew.
    """

    def __init__(self, family: str) -> None:
        self.kind = family if family in ("passed", "rewritten") else ""
        more = {"router_aux_loss_coef": 0.5, "num_hidden_layers": 4, "output_router_logits": self.kind != "passed"}
        super().__init__("Mixtral" if self.kind else family, **more)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = torch.ones_like(batch[0])
        mask[:, -2:] = batch[1][:, -2:] % 2
        out = self.net(input_ids=batch[0], attention_mask=mask, output_router_logits=True)
        loss = F.cross_entropy(out.logits.double().flatten(0, 1), batch[1].flatten())
        if self.kind == "rewritten":
            return loss + torch.cat(out.router_logits).softmax(-1).mean(0).square().sum()
        return loss + 0.5 * out.aux_loss


class Asking(Pretrained):
    """One of four layers whose balancing loss counts; in the step, in its own loss, or not at all.

    Args:
        how: ``step``, ``labels``, or ``left``.
    """

    def __init__(self, how: str) -> None:
        self.how = how
        super().__init__("Mixtral", num_hidden_layers=4, router_aux_loss_coef=0.5, output_router_logits=how == "step")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.how == "labels":
            return self.net(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]
        out = self.net(input_ids=batch[0])
        loss = self.net.loss_function(out.logits, batch[0], VOCABULARY)
        return loss + 0.5 * out.aux_loss if self.how == "step" else loss  # type: ignore[no-any-return]


class Sharing(Words):
    """Has the same experts in the first and the last layer.

    Args:
        listed: whether they are a list.
    """

    def __init__(self, listed: bool = False) -> None:
        super().__init__([strangers.Block(strangers.Loop) for _ in range(4)] if listed else None)
        mixtures = [layer.mixture if listed else layer for layer in self.layers]
        mixtures[-1].experts = mixtures[0].experts  # type: ignore[union-attr]


class OneLess(Words):
    """Has more experts than ranks can share."""

    def __init__(self) -> None:
        super().__init__([Mixture(count=3)])


class Summed(Stacked):
    """An expert sees what another one does."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, index, weights) * hidden.mean()


class Mixed(Words):
    """Experts that are none."""

    def __init__(self) -> None:
        super().__init__([Mixture(Summed())])


class ByHand(Words):
    """Steps by hand."""

    automatic_optimization = False


class Given(nn.Module):
    """A mixture that is given what another one has made, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Mixture()

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        return self.mixture(x + 0.5 * given)  # type: ignore[no-any-return]


class Encoded(Words):
    """A mixture before the layers, whose output all of them are given, as those of a decoder are given an encoder's."""

    def __init__(self, listed: bool = False) -> None:
        super().__init__([Given() for _ in range(4)])
        self.encoder = strangers.Block(strangers.Loop) if listed else Mixture()

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0])
        given = self.encoder(x.flip(1))
        for layer in self.layers:
            x = layer(x, given)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())


class Dense(Words):
    """Has no experts."""

    def __init__(self) -> None:
        super().__init__([nn.Linear(WIDTH, WIDTH) for _ in range(3)])


class ByNorm(torch.optim.SGD):
    """Updates every parameter by a step of length one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad / parameter.grad.norm()
        return loss


class WholeUpdates(Words):
    """Has an optimizer that looks at whole parameters."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ByNorm(self.parameters(), lr=1e-2)


MODULES = {
    "words": Words,
    "starved": Starved,
    "starved_rectified": lambda: Starved([Mixture(strangers.Rectified()) for _ in range(4)]),
    "uneven": Uneven,
    "sharing": Sharing,
    "sharing_list": lambda: Sharing(listed=True),
    "watched": Watched,
    "one_less": OneLess,
    "mixed": Mixed,
    "by_hand": ByHand,
    "dense": Dense,
    "encoded": Encoded,
    "encoded_list": lambda: Encoded(listed=True),
    "whole_updates": WholeUpdates,
    "gathered": Gathered,
    "drop_in": DropIn,
    "some_samples": SomeSamples,
    "some_samples_list": lambda: SomeSamples([strangers.Block(strangers.Loop) for _ in range(4)]),
    "penalised": Penalised,
    "left_out": LeftOut,
    "by_sequence": BySequence,
    "summing": Summing,
    "summing_by_sequence": SummingBySequence,
    "unbalanced": Unbalanced,
    "hooked_weights": HookedWeights,
    "multiplied": Multiplied,
    "masked": Masked,
    "late": Late,
    "late_unread": LateUnread,
    "switching": Switching,
    "tight": Tight,
    "dealt": Tight,
    "biased": Biased,
    "flat": Flat,
    "jittery": Jittery,
    "built_later": BuiltLater,
    "reference": Reference,
}


class Data(LightningDataModule):
    """Three batches of 16, of which each replica takes a block.

    Args:
        name: says where the last replica lacks samples: ``uneven_batches``, ``uneven_validation``, ...; or that samples
            are ``dealt`` to the replicas in turns.
    """

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name
        self.tokens = torch.randint(0, VOCABULARY, (3, 16, TOKENS + 1), generator=torch.Generator().manual_seed(7))

    def _loader(self, kind: str) -> Any:
        sizes = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        own = self.tokens.chunk(sizes["num_replicas"], 1)[sizes["rank"]]
        if self.name == "dealt":
            data = TensorDataset(self.tokens[..., :-1].flatten(0, 1), self.tokens[..., 1:].flatten(0, 1))
            return DataLoader(data, own.shape[1], sampler=DistributedSampler(data, **sizes, shuffle=False))
        if self.name == f"uneven_{kind}" and sizes["rank"] == sizes["num_replicas"] - 1:
            own = own[:, :5] if kind == "batches" else own[:1]
        x, y = own[..., :-1].flatten(0, 1), own[..., 1:].flatten(0, 1).clone()
        if self.name in ("masked", "strange_sure") and kind == "batches":
            y[:, 2:][x[:, 0] % 2 == 0] = -100
        return DataLoader(TensorDataset(x, y), batch_size=own.shape[1])

    def train_dataloader(self) -> Any:
        return self._loader("batches")

    def val_dataloader(self) -> Any:
        return self._loader("validation")

    def predict_dataloader(self) -> Any:
        return self._loader("predictions")


def built(name: str) -> LightningModule:
    """A module by name, with the same weights each time."""
    torch.manual_seed(3)
    if name.startswith("strange_"):
        return Strange(name.removeprefix("strange_"))
    if name.startswith("planned_"):
        return Words([strangers.Block(PLANNED[name.removeprefix("planned_")][0]) for _ in range(4)])
    if name == "reading":
        return Words([Reading() for _ in range(4)])
    if name.startswith("attending_"):
        return Strange(name.removeprefix("attending_"), strangers.Attending)
    if name.startswith("moving_"):
        return Moving(name.removeprefix("moving_"), gathers=False)
    if name.startswith("gathering_"):
        return Moving(name.removeprefix("gathering_"), gathers=True)
    if name.startswith("asking_"):
        return Asking(name.removeprefix("asking_"))
    if name.startswith("balanced_"):
        return Balanced(name.removeprefix("balanced_"))
    if name.startswith("deep_"):
        return Large(name.removeprefix("deep_"), deep=True)
    if name.startswith("large_"):
        return Large(name.removeprefix("large_"))
    if name in (*FAMILIES, *FURTHER, *UNSPLIT):
        return Pretrained(name)
    return MODULES.get(name, Words)()


def fit(
    info: RankInfo,
    name: str,
    options: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    steps: int = 3,
    load: str = "",
    save: str = "",
) -> dict[str, Any]:
    """Logged losses and the whole weights after some steps, and how much of the experts this rank holds.

    Args:
        info: of the job.
        name: of the module.
        options: of the strategy; ``None`` for Lightning's own.
        trainer: further arguments of the Trainer.
        steps: to take, those of the checkpoint among them.
        load: a checkpoint to go on from.
        save: where to save one.
    """
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    module, settings = built(name), {"gradient_clip_val": 0.5, "num_sanity_val_steps": 0, **(trainer or {})}
    whole = _of_experts(module)
    runner = make_trainer(info, strategy, max_steps=steps, **settings)
    runner.fit(module, datamodule=Data(name), ckpt_path=load or None)
    if name == "uneven_predictions":
        runner.predict(module, datamodule=Data(name))
    if save:
        runner.save_checkpoint(save)
    state = module.state_dict() if options is None else runner.strategy.full_state_dict()
    return {
        "losses": {name: float(value) for name, value in runner.callback_metrics.items()},
        "weights": {name: value.detach().clone() for name, value in state.items()},
        "share": _of_experts(module) / max(whole, 1),
    }


def _of_experts(module: LightningModule) -> int:
    return sum(p.numel() for name, p in module.named_parameters() if "experts" in name and not p.is_meta)
