"""How a model is to be run: the parallel sizes, the micro-batch, and what the software does with them.

The four axis sizes alone (``mesh.layout``) do not fix a step's time or memory; a recipe adds the batch,
the schedule, sharding, recomputation, precision, and a few traits of the software that do change both, such as
whether the attention scores are ever written to memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

SHARDINGS = ("none", "zero1", "zero2", "fsdp", "hsdp")
RECOMPUTES = ("none", "selective", "full", "auto")
PRECISIONS = ("fp16", "bf16", "fp8", "fp32", "fp64")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
VEE_SCHEDULES = ("zb-v", "dualpipe-v")
"""Schedules whose first rank holds the first and the last virtual stage."""


@dataclass(frozen=True, slots=True)
class Software:
    """Traits of a training stack that a cost model can count; none of them is a measured speed.

    Args:
        name: for reports.
        fused_attention: scores stay on chip (FlashAttention and its kin) instead of going through memory.
        fused_kernels: bias, activation, dropout, norm and rotary chains run as one kernel each.
        overlap_tensor: tensor-parallel transfers run beside the matrix products they feed.
        overlap_data: gradient reduction and parameter gathering run beside compute.
        overlap_pipeline: stage-to-stage transfers run beside compute.
        block_recompute: ``selective`` recomputation repeats about every other operation of a block (FSDP trainers)
            instead of only the attention core (Megatron).
        dropout: masks are kept for the backward.
        direct_gradients: weight gradients accumulate straight into the 32-bit buffer; otherwise a 16-bit gradient lies
            beside it.
        keeps_intermediates: plain modules keep what a compiled or fused norm and gated activation would not: the 32-bit
            inputs of norms, and the activation before the gate is applied.
        bucket: gradient elements that are copied for one reduction, of which two are under way.
        scatter_gather: tensor ranks that hold the same boundary activation each send their own 1/t of it; otherwise
            each sends all of it and keeps it until the backward.
        blocking_launches: the host waits for the GPU in every layer (per-layer checkpointing that copies random states,
            transfers that synchronise), so its own time adds up instead of running ahead.
        single_adapter: gathering of sharded weights reaches one network adapter per node and looks no layer ahead.
        post_validation: no collective over the pipeline ends a step (the optimizer steps first and repairs later), so
            ranks may start their next step at different times.
        frees_gradients: where a step is one backward, replicas keep only their shard of the summed gradients.
        tied_state_once: the first and the last stage share one sharded optimizer state of a tied embedding and head.
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
"""Megatron-LM before fused attention: fused small kernels, no transfer beside compute."""
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021, name="megatron-deepspeed", bucket=5e8, scatter_gather=False, blocking_launches=True
)
"""The same layers under DeepSpeed's pipeline, which has ZeRO-1, large buckets and sends whole boundaries."""
MEGATRON_CORE = Software(name="megatron-core", fused_kernels=True, overlap_tensor=True, keeps_intermediates=False)
"""Megatron-Core with Transformer Engine: everything fused, everything overlapped."""
PYTORCH_FSDP = Software(name="pytorch-fsdp", overlap_pipeline=False, block_recompute=True, keeps_intermediates=False)
"""PyTorch's fully sharded data parallelism with its own fused attention; its trainers compile or fuse norms."""
DEEPSPEED_ZERO3 = replace(
    PYTORCH_FSDP, name="deepspeed-zero3", fused_attention=False, dropout=True, single_adapter=True
)
"""ZeRO-3 before fused attention. It gathered parameter by parameter: table 2 of arXiv 2104.04473 shows the same step
time on 768 and 1536 GPUs, at 17 GB/s per GPU, which is one 200 Gb/s adapter per node."""
PLAIN_3D = Software(name="plain-3d", overlap_data=False, overlap_pipeline=False, direct_gradients=False)
"""Tensor, pipeline and data parallelism in plain PyTorch with fused attention and no transfer beside compute."""
LIGHTNING = Software(frees_gradients=True, tied_state_once=True)
"""This package's strategy."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to run one model.

    Args:
        tensor, pipeline, data, context: ranks on each axis; their product is the world.
        micro_batch: sequences of one micro-batch b.
        global_batch: sequences of one optimizer step over all replicas.
        chunks: model chunks per pipeline rank v (above 1 for interleaving).
        schedule: name of the pipeline schedule.
        sharding: ``none``, ``zero1`` (optimizer), ``zero2`` (and gradients), ``fsdp`` (and weights) or ``hsdp``
            (``fsdp`` inside a node, copies across nodes).
        recompute: ``none``, ``selective``, ``full``, or ``auto`` (as few layers in full as memory needs).
        sequence_parallel: norms and dropout are split along the sequence over the tensor ranks.
        precision: ``fp16``, ``bf16`` or ``fp8`` (8-bit matrix products, the rest 16-bit), each with 32-bit master
            weights; or ``fp32`` or ``fp64`` throughout.
        gradient_bytes: bytes per gradient element kept and reduced; None follows the precision and software.
        software: traits of the training stack.

    Raises:
        ValueError: a size is below 1, a name is unknown, or the batch does not divide.
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

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "context", "micro_batch", "global_batch", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}={getattr(self, name)}` must be at least 1; correct `{name}`")
        _check_member("sharding", self.sharding, SHARDINGS)
        _check_member("recompute", self.recompute, RECOMPUTES)
        _check_member("precision", self.precision, PRECISIONS)
        _check_member("schedule", self.schedule, SCHEDULES)
        self._check_chunks()
        if self.global_batch < self.data * self.micro_batch:
            raise ValueError(
                f"`global_batch={self.global_batch}` is below data x micro_batch = {self.data} x {self.micro_batch};"
                " raise `global_batch` or lower `micro_batch`"
            )

    def _check_chunks(self) -> None:
        """Refuse a number of chunks that the schedule cannot have."""
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
        """Pipeline rank that holds a virtual stage, see :func:`rank_of`."""
        return rank_of(virtual_stage, self.pipeline, self.schedule in VEE_SCHEDULES)

    @property
    def virtual_stages(self) -> int:
        """Pipeline ranks times chunks."""
        return self.pipeline * self.chunks

    @property
    def world(self) -> int:
        """Number of GPUs."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def micro_batches(self) -> int:
        """Micro-batches per replica and step, rounded up where the batch does not divide."""
        return -(-self.global_batch // (self.data * self.micro_batch))

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights and reduce their gradients together: data x context."""
        return self.data * self.context

    @property
    def bytes_per_gradient(self) -> int:
        """Bytes per gradient element: 4 with fp32 main gradients, 2 where fp16 gradients are reduced as they are."""
        if self.gradient_bytes is not None:
            return self.gradient_bytes
        return {"fp16": 2, "fp64": 8}.get(self.precision, 4)

    @property
    def element(self) -> int:
        """Bytes of one weight or activation as layers hold them."""
        return {"fp32": 4, "fp64": 8}.get(self.precision, 2)

    @property
    def mixed(self) -> bool:
        """Whether 32-bit master weights lie beside 16-bit ones."""
        return self.element == 2

    def describe(self) -> str:
        """One line: ``t8 p8 v2 d24 c1 b2 interleaved zero1 full+sp bf16``."""
        sp = "+sp" if self.sequence_parallel and self.tensor > 1 else ""
        return (
            f"t{self.tensor} p{self.pipeline} v{self.chunks} d{self.data} c{self.context} b{self.micro_batch} "
            f"{self.schedule} {self.sharding} {self.recompute}{sp} {self.precision}"
        )


def rank_of(virtual_stage: int, pipeline: int, vee: bool) -> int:
    """Pipeline rank that holds a virtual stage: round and round, or there and back for the V schedules.

    With 2 ranks and 2 chunks: interleaved 0, 1, 0, 1; zb-v 0, 1, 1, 0.
    """
    if vee and virtual_stage >= pipeline:
        return 2 * pipeline - 1 - virtual_stage
    return virtual_stage % pipeline


def _check_member(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a name that is not one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"`{name}={value}` is not one of {', '.join(allowed)}; choose one of these for `{name}`")
