"""Recipes: the parallel sizes, batch, schedule and software with which a model is trained.

The four axis sizes alone (``mesh.layout``) do not determine the time or memory of a step. A recipe adds the batch, the
schedule, sharding, recomputation, precision, and traits of the software that affect both, such as whether attention
scores are written to memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_megatron.planner.model.software import LIGHTNING, Software

SHARDINGS = ("none", "zero1", "zero2", "fsdp", "hsdp")
RECOMPUTES = ("none", "selective", "full", "auto")
PRECISIONS = ("fp16", "bf16", "fp8", "fp32", "fp64")
CONTEXT_METHODS = ("gather", "ring", "ulysses")
FREES = ("auto", "layer", "step")
GRADIENT_SUMS = ("auto", "micro_batch", "step")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
VEE_SCHEDULES = ("zb-v", "dualpipe-v")
"""Schedules whose first pipeline rank runs the first and the last virtual stage."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A layout with the batch, schedule and other choices that a prediction needs.

    Args:
        tensor, pipeline, data, context: ranks on each axis; their product is the world size.
        micro_batch: sequences per micro-batch b.
        global_batch: sequences per optimizer step over all replicas.
        chunks: model chunks per pipeline rank v (above 1 for interleaving).
        schedule: name of the pipeline schedule.
        sharding: ``none``, ``zero1`` (optimizer), ``zero2`` (and gradients), ``fsdp`` (and weights) or ``hsdp``
            (``fsdp`` inside a node, replicated across nodes).
        recompute: ``none``, ``selective``, ``full``, or ``auto`` (full recomputation of as few layers as memory
            requires).
        sequence_parallel: norms and dropout are split along the sequence over the tensor ranks.
        precision: ``fp16``, ``bf16`` or ``fp8`` (8-bit matrix products, the rest 16-bit), each with 32-bit master
            weights; or ``fp32`` or ``fp64`` throughout.
        gradient_bytes: bytes per gradient element kept and reduced; None follows from the precision.
        software: traits of the training stack.
        shard: neighbouring replicas that share one copy of what ``sharding`` shards; None means all of them, and those
            of a node with ``hsdp``.
        free: when weights of ``fsdp`` and ``hsdp`` are freed again: after each ``layer`` or at the end of a ``step``;
            ``auto`` follows from the software.
        gradient_sum: when their gradients are summed and cut into shards: after each ``micro_batch`` or once a
            ``step``; ``auto`` follows from the software.
        optimizer_offload: share of the optimizer's weights and state that lies, and is updated, in host memory.
        activation_offload: share of the tokens whose activations go to host memory, while linear layers of the others
            are computed again and attention never is; ``auto`` for the largest that copies and memory allow; ``inputs``
            for the inputs of layers that are computed again in full; None for nothing.
        expert: ranks that share out the experts of mixtures; it divides tensor x context x data.
        imbalance: rows of the busiest of these ranks over their mean, as ``expert_load_ranks`` shows.
        context_method: how attention meets other context ranks' tokens: ``gather``, ``ring`` or ``ulysses``.
        context_heads: context ranks, neighbours, that share the heads under ``ulysses``; a ring passes keys and values
            from one such set to the next. None for all.
        weight_offload: shards of weights lie in host memory, and their gradients go there (only with sharded weights).
        loss_chunks: pieces of the tokens in which logits and the loss are computed, and again in the backward.
        mlp_chunks: pieces of the tokens in which MLPs are computed, and again in the backward.

    Raises:
        ValueError: a size is below 1, a name is unknown, a share is not one, or the batch does not divide.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    sharding: str = "zero1"
    recompute: str = "none"
    sequence_parallel: bool = True
    precision: str = "bf16"
    gradient_bytes: int | None = None
    software: Software = field(default=LIGHTNING)
    free: str = "auto"
    gradient_sum: str = "auto"
    optimizer_offload: float = 0.0
    activation_offload: float | str | None = None
    expert: int = 1
    imbalance: float = 1.0
    context_method: str = "gather"
    loss_chunks: int = 1
    mlp_chunks: int = 1
    weight_offload: bool = False
    shard: int | None = None
    context_heads: int | None = None

    def __post_init__(self) -> None:
        sizes = ("tensor", "pipeline", "data", "context", "micro_batch", "global_batch", "chunks")
        for name in (*sizes, "loss_chunks", "mlp_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}={getattr(self, name)}` must be at least 1; correct `{name}`")
        _check_member("sharding", self.sharding, SHARDINGS)
        _check_member("recompute", self.recompute, RECOMPUTES)
        _check_member("precision", self.precision, PRECISIONS)
        _check_member("schedule", self.schedule, SCHEDULES)
        _check_member("context_method", self.context_method, CONTEXT_METHODS)
        _check_member("free", self.free, FREES)
        _check_member("gradient_sum", self.gradient_sum, GRADIENT_SUMS)
        if not self.shards_weights and (self.free, self.gradient_sum) != ("auto", "auto"):
            raise ValueError(
                f"`free={self.free}` and `gradient_sum={self.gradient_sum}` are about sharded weights, and"
                f" `sharding={self.sharding}` shards none; leave them out, or use `sharding=fsdp`"
            )
        _check_share("optimizer_offload", self.optimizer_offload)
        if self.weight_offload and not self.shards_weights:
            raise ValueError(
                f"`weight_offload=True` is about shards of weights; use `sharding=fsdp`, not {self.sharding}"
            )
        self._check_offload()
        self._check_context_heads()
        block = self.tensor * self.context * self.data
        if self.expert < 1 or block % self.expert:
            raise ValueError(
                f"`expert={self.expert}` does not divide tensor x context x data = {block}, over which experts are"
                " shared out; use a divisor"
            )
        if not 1.0 <= self.imbalance < math.inf:
            raise ValueError(f"`imbalance={self.imbalance}` is the busiest rank's rows over the mean, at least 1")
        self._check_chunks()
        self._check_shard()
        if self.global_batch < self.data * self.micro_batch:
            raise ValueError(
                f"`global_batch={self.global_batch}` is below data x micro_batch = {self.data} x {self.micro_batch};"
                " raise `global_batch` or lower `micro_batch`"
            )

    def _check_offload(self) -> None:
        """Refuse an invalid offload of activations, or one that the recomputation contradicts.

        Raises:
            ValueError: with both.
        """
        given = self.activation_offload
        if given is None:
            return
        if isinstance(given, str):
            _check_member("activation_offload", given, ("auto", "inputs"))
        else:
            _check_share("activation_offload", given)
        needed = "full" if given == "inputs" else "none"
        if self.recompute != needed:
            raise ValueError(
                f"`activation_offload={given}` goes with `recompute={needed}`, not with `{self.recompute}`: a share "
                "says itself what is computed again, and `inputs` are those of layers that all are"
            )
        if given != "inputs" and not self.software.fused_attention:
            raise ValueError(
                f"`activation_offload={given}` keeps the output of fused attention, and `{self.software.name}` has"
                " none; use `inputs` with `recompute=full`"
            )

    def _check_shard(self) -> None:
        """Refuse a number of replicas that cannot share a copy.

        Raises:
            ValueError: nothing is shared, or the number does not divide the replicas.
        """
        if self.shard is None:
            return
        if self.sharding == "none":
            raise ValueError(f"`shard={self.shard}` replicas share nothing with `sharding=none`; leave `shard` out")
        if self.shard < 1 or self.replicas % self.shard:
            raise ValueError(
                f"`shard={self.shard}` does not divide data x context = {self.replicas} replicas; use a divisor"
            )

    def _check_context_heads(self) -> None:
        heads = self.context_heads
        if heads is None:
            return
        if self.context_method != "ulysses":
            raise ValueError(
                f"`context_heads={heads}` is about `context_method=ulysses`, not {self.context_method}; leave it out"
            )
        if heads < 1 or self.context % heads:
            raise ValueError(
                f"`context_heads={heads}` ranks share the heads, of `context={self.context}`; use a divisor of it"
            )

    def _check_chunks(self) -> None:
        """Refuse a number of chunks that the schedule does not support.

        Raises:
            ValueError: the number of chunks is not the schedule's.
        """
        if self.schedule in VEE_SCHEDULES and self.chunks != 2:
            raise ValueError(
                f"`schedule={self.schedule}` has 2 chunks per rank, got `chunks={self.chunks}`; set it to 2"
            )
        if self.schedule not in (*VEE_SCHEDULES, "interleaved") and self.chunks != 1:
            raise ValueError(
                f"`schedule={self.schedule}` has 1 chunk per rank, got `chunks={self.chunks}`; use"
                " `schedule=interleaved`"
            )

    def rank_of(self, virtual_stage: int) -> int:
        """Pipeline rank that runs a virtual stage, see :func:`rank_of`."""
        return rank_of(virtual_stage, self.pipeline, self.schedule in VEE_SCHEDULES)

    @property
    def shards_weights(self) -> bool:
        """Whether each replica keeps a shard of the weights only."""
        return self.sharding in ("fsdp", "hsdp")

    @property
    def virtual_stages(self) -> int:
        """Number of virtual stages: pipeline ranks times chunks."""
        return self.pipeline * self.chunks

    @property
    def world(self) -> int:
        """Number of GPUs."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def micro_batches(self) -> int:
        """Micro-batches per replica and step, rounded up if the batch does not divide."""
        return -(-self.global_batch // (self.data * self.micro_batch))

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same weights and reduce their gradients together: data x context."""
        return self.data * self.context

    @property
    def expert_copies(self) -> int:
        """Number of ranks that hold the same experts, and reduce their gradients together."""
        return self.tensor * self.context * self.data // self.expert

    @property
    def bytes_per_gradient(self) -> int:
        """Bytes per gradient element: 4 with float32 main gradients, 2 for fp16 in most software, 8 for fp64."""
        if self.gradient_bytes is not None:
            return self.gradient_bytes
        return {"fp16": 2 if self.software.sums_in_16_bits else 4, "fp64": 8}.get(self.precision, 4)

    @property
    def element(self) -> int:
        """Bytes per element of weights and activations in the layers."""
        return {"fp32": 4, "fp64": 8}.get(self.precision, 2)

    @property
    def mixed(self) -> bool:
        """Whether the optimizer keeps 32-bit master weights beside the 16-bit weights of layers."""
        return self.element == 2

    def describe(self) -> str:
        """One line: ``t8 p8 v2 d24 c1 b2 interleaved zero1 full+sp bf16``."""
        sp = "+sp" if self.sequence_parallel and self.tensor > 1 else ""
        words = [self.sizes(), self.schedule, self.sharding, f"{self.recompute}{sp}", self.precision, *self.savings()]
        return " ".join(words)

    @property
    def heads_over(self) -> int:
        """Context ranks that exchange tokens for heads; 1 for other methods than ``ulysses``."""
        return (self.context_heads or self.context) if self.context_method == "ulysses" else 1

    @property
    def rings(self) -> int:
        """Sets of such ranks, among which keys and values pass around; 1 for other methods than ``ulysses``."""
        return self.context // self.heads_over if self.context_method == "ulysses" else 1

    def sizes(self) -> str:
        """The sizes alone: ``t8 p8 v2 d24 c1 b2``."""
        experts = f" e{self.expert}" if self.expert > 1 else ""
        grid = f"t{self.tensor} p{self.pipeline} v{self.chunks} d{self.data} c{self.context}"
        return f"{grid} b{self.micro_batch}{experts}"

    def savings(self) -> list[str]:
        """The memory savings besides sharding and recomputation, in words; empty without any."""
        method = f"{self.context_method}/{self.heads_over}" if self.rings > 1 else self.context_method
        found = [method] if self.context > 1 else []
        found += [f"loss/{self.loss_chunks}"] if self.loss_chunks > 1 else []
        found += [f"mlp/{self.mlp_chunks}"] if self.mlp_chunks > 1 else []
        found += [f"shard/{self.shard}"] if self.shard is not None and self.shard < self.replicas else []
        if (self.free, self.gradient_sum) != ("auto", "auto"):
            found.append(f"free/{self.free} sum/{self.gradient_sum}")
        if self.optimizer_offload:
            found.append(f"optimizer/host{100 * self.optimizer_offload:.0f}%")
        found += ["weights/host"] if self.weight_offload else []
        if isinstance(self.activation_offload, str):
            found.append(f"activations/host-{self.activation_offload}")
        elif self.activation_offload is not None:
            found.append(f"activations/host{100 * self.activation_offload:.0f}%")
        return found


def rank_of(virtual_stage: int, pipeline: int, vee: bool) -> int:
    """Pipeline rank that runs a virtual stage: in a loop, or down and up for V schedules with 2 chunks.

    With 2 ranks and 2 chunks: interleaved 0, 1, 0, 1; zb-v 0, 1, 1, 0.
    """
    if vee and virtual_stage >= pipeline:
        return 2 * pipeline - 1 - virtual_stage
    return virtual_stage % pipeline


def _check_member(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not one of ``allowed``.

    Raises:
        ValueError: lists the allowed values.
    """
    if value not in allowed:
        raise ValueError(f"`{name}={value}` is not one of {', '.join(allowed)}; choose one of these for `{name}`")


def _check_share(name: str, value: float) -> None:
    """Refuse what is no share.

    Raises:
        ValueError: ``value`` lies outside of 0 to 1.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"`{name}={value!r}` must be a share, from 0 to 1; correct `{name}`")
