"""Recipes: the parallel sizes, batch, schedule and software with which a model is trained.

The four axis sizes alone (``mesh.layout``) do not determine the time or memory of a step. A recipe adds the batch, the
schedule, sharding, recomputation, precision, and traits of the software that affect both, such as whether attention
scores are written to memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

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
class Software:
    """Traits of a training stack that the cost model counts; none of them is a measured speed.

    Args:
        name: for reports.
        fused_attention: attention scores stay on chip (FlashAttention) instead of being written to memory.
        fused_kernels: chains of bias, activation, dropout, norm and rotary embedding run as one kernel each.
        overlap_tensor: tensor-parallel transfers overlap with matrix products.
        overlap_data: gradient reduction and all-gathers of parameters overlap with compute.
        overlap_pipeline: transfers between stages overlap with compute.
        block_recompute: ``selective`` recomputation repeats about every other operation of a block (FSDP trainers)
            instead of only the attention core (Megatron).
        dropout: dropout masks are kept for the backward.
        direct_gradients: weight gradients accumulate directly into the 32-bit buffer; otherwise a 16-bit gradient is
            kept beside it.
        keeps_intermediates: plain modules keep activations that compiled or fused norms and gated activations do not:
            the 32-bit inputs of norms, and the activation before the gate is applied.
        bucket: gradient elements in the buffer of one reduction; two buffers are in use at once.
        scatter_gather: tensor ranks with the same boundary activation each send 1/t of it; otherwise each sends all of
            it and keeps it until the backward.
        blocking_launches: the host waits for the GPU in every layer (per-layer checkpointing that copies random states,
            transfers that synchronise), so host time adds to GPU time instead of overlapping.
        single_adapter: all-gathers of sharded weights use one network adapter per node and do not prefetch layers.
        post_validation: no collective over the pipeline ends a step (the optimizer steps first and corrects later), so
            ranks may start their next step at different times.
        frees_gradients: if a step is one backward, replicas keep only their shard of the summed gradients.
        tied_state_once: the first and the last stage share one sharded optimizer state of a tied embedding and head.
        prefetches_weights: sharded weights of the next layer are gathered while one computes; otherwise a layer waits.
        sums_shards: gradients of sharded weights are summed over replicas, and only shards are kept, after every
            micro-batch; otherwise whole gradients add up over the micro-batches of a step.
        frees_under_pipeline: sharded weights are freed after each layer under a pipeline too; otherwise they stay whole
            from the first micro-batch to the last.
        folds_experts: the ranks that share out experts are tensor and context ranks too; otherwise replicas only,
            without tensor or context ranks.
        overlap_context: messages of a ring of context ranks overlap with its attention.
        repeats_gathered: attention over gathered keys and values is computed again in the backward, after another
            gather.
        whole_embedding: embeddings of all tokens are computed on every context rank.
        chunks_sharded_head: logits can be computed in pieces while weights are sharded.
        keeps_16_bit_shard: the shard of the weights in 16 bits is kept beside the optimizer's in 32 bits.
    """

    name: str = "lightning"
    fused_attention: bool = True
    fused_kernels: bool = False
    overlap_tensor: bool = False
    overlap_data: bool = True
    overlap_pipeline: bool = True
    block_recompute: bool = False
    dropout: bool = False
    direct_gradients: bool = True
    keeps_intermediates: bool = True
    bucket: float = 4e7
    scatter_gather: bool = True
    blocking_launches: bool = False
    single_adapter: bool = False
    post_validation: bool = False
    frees_gradients: bool = False
    tied_state_once: bool = False
    prefetches_weights: bool = True
    sums_shards: bool = True
    frees_under_pipeline: bool = False
    keeps_16_bit_shard: bool = False
    folds_experts: bool = True
    overlap_context: bool = True
    repeats_gathered: bool = False
    whole_embedding: bool = False
    chunks_sharded_head: bool = True


MEGATRON_2021 = Software(
    name="megatron-2021",
    fused_attention=False,
    fused_kernels=True,
    overlap_data=False,
    overlap_pipeline=False,
    dropout=True,
    direct_gradients=False,
    keeps_intermediates=False,
)
"""Megatron-LM before fused attention: fused small kernels, no overlap of transfers with compute."""
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021, name="megatron-deepspeed", bucket=5e8, scatter_gather=False, blocking_launches=True
)
"""The same layers in DeepSpeed's pipeline, with ZeRO-1, large buckets and unsplit boundary activations."""
MEGATRON_CORE = Software(name="megatron-core", fused_kernels=True, overlap_tensor=True, keeps_intermediates=False)
"""Megatron-Core with Transformer Engine: everything fused, everything overlapped."""
PYTORCH_FSDP = Software(name="pytorch-fsdp", overlap_pipeline=False, block_recompute=True, keeps_intermediates=False)
"""PyTorch's fully sharded data parallelism with fused attention and compiled or fused norms."""
DEEPSPEED_ZERO3 = replace(
    PYTORCH_FSDP, name="deepspeed-zero3", fused_attention=False, dropout=True, single_adapter=True
)
"""ZeRO-3 before fused attention. It all-gathers one parameter at a time: table 2 of arXiv 2104.04473 shows the same
step time on 768 and 1536 GPUs, at 17 GB/s per GPU, which is one 200 Gb/s adapter per node."""
PLAIN_3D = Software(name="plain-3d", overlap_data=False, overlap_pipeline=False, direct_gradients=False)
"""Tensor, pipeline and data parallelism in plain PyTorch, with fused attention and no overlap with compute."""
LIGHTNING = Software(
    frees_gradients=True,
    tied_state_once=True,
    sums_shards=False,
    frees_under_pipeline=True,
    keeps_16_bit_shard=True,
    folds_experts=False,
    overlap_context=False,
    repeats_gathered=True,
    whole_embedding=True,
    chunks_sharded_head=False,
)
"""This package's strategy."""


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
        block = self.tensor * self.context * self.data
        if self.expert < 1 or block % self.expert:
            raise ValueError(
                f"`expert={self.expert}` does not divide tensor x context x data = {block}, over which experts are"
                " shared out; use a divisor"
            )
        if not 1.0 <= self.imbalance < math.inf:
            raise ValueError(f"`imbalance={self.imbalance}` is the busiest rank's rows over the mean, at least 1")
        self._check_chunks()
        if self.global_batch < self.data * self.micro_batch:
            raise ValueError(
                f"`global_batch={self.global_batch}` is below data x micro_batch = {self.data} x {self.micro_batch};"
                " raise `global_batch` or lower `micro_batch`"
            )

    def _check_offload(self) -> None:
        """Refuse an offload of activations that is none, or that the recomputation contradicts.

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
        """Bytes per gradient element: 4 with float32 main gradients, 2 for fp16, 8 for fp64."""
        if self.gradient_bytes is not None:
            return self.gradient_bytes
        return {"fp16": 2, "fp64": 8}.get(self.precision, 4)

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

    def sizes(self) -> str:
        """The sizes alone: ``t8 p8 v2 d24 c1 b2``."""
        experts = f" e{self.expert}" if self.expert > 1 else ""
        grid = f"t{self.tensor} p{self.pipeline} v{self.chunks} d{self.data} c{self.context}"
        return f"{grid} b{self.micro_batch}{experts}"

    def savings(self) -> list[str]:
        """What saves memory besides sharding and recomputation, in words; empty without any."""
        found = [self.context_method] if self.context > 1 else []
        found += [f"loss/{self.loss_chunks}"] if self.loss_chunks > 1 else []
        found += [f"mlp/{self.mlp_chunks}"] if self.mlp_chunks > 1 else []
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
