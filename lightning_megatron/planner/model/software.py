"""Traits of training stacks that the cost model counts; none of them is a measured speed."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
        keeps_8_bit_inputs: 8-bit products keep their inputs in 8 bits for the backward; otherwise in 16.
        keeps_gathered: under sequence parallelism a product keeps its gathered input for the backward; otherwise the
            shard, which is gathered again.
        keeps_outputs: the last stage of a pipeline keeps the logits of all micro-batches, and joins them when a step
            ends.
        sums_in_16_bits: in fp16 the gradients of a step add up in 16 bits.
        offloads_inputs: of layers that are computed again in full, the inputs may lie in host memory.
        splits_repeated_tokens: layers can compute some of their tokens again under sequence parallelism, and under
            schedules that split backwards.
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
    keeps_8_bit_inputs: bool = True
    keeps_gathered: bool = False
    keeps_outputs: bool = False
    sums_in_16_bits: bool = True
    offloads_inputs: bool = True
    splits_repeated_tokens: bool = True


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
PYTORCH_FSDP = Software(
    name="pytorch-fsdp",
    overlap_pipeline=False,
    block_recompute=True,
    keeps_intermediates=False,
    keeps_8_bit_inputs=False,
    keeps_gathered=True,
    keeps_outputs=True,
)
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
    overlap_context=False,
    repeats_gathered=True,
    whole_embedding=True,
    chunks_sharded_head=False,
    sums_in_16_bits=False,
    offloads_inputs=False,
    splits_repeated_tokens=False,
)
"""This package's strategy."""
