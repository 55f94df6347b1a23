"""Reads published runs: each CSV row becomes a shape, a recipe and a cluster.

Measured columns (``MEASURED``) are removed from a row before it is read, so a prediction cannot depend on them. Values
that a row leaves out get documented defaults. The traits of the software are inferred from sharding, precision and GPU,
never from the source of the row.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_megatron.planner.cost.memory import peak_memory, recompute_share
from lightning_megatron.planner.model.cluster import Cluster, cluster_for
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape
from lightning_megatron.planner.model.software import (
    DEEPSPEED_ZERO3,
    MEGATRON_2021,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    PLAIN_3D,
    PYTORCH_FSDP,
    Software,
)

MEASURED = frozenset(
    {
        "iter_s",
        "tok_s_gpu",
        "tflops_gpu_reported",
        "mfu_reported",
        "hfu_reported",
        "mem_gb",
        "model_tflops_gpu_std",
        "mfu_std",
    }
)
"""Columns with measurements; read only to score finished predictions."""

_NEEDED = ("layers", "hidden", "heads", "seq", "gpu", "gbs")
_DEFAULT_VOCAB = 51200
_SCHEDULE_WORDS = (
    (r"\bzb-?2p\b|\bzb-?h2\b", "zb-h2"),
    (r"\bzb-?1p\b|\bzb-?h1\b", "zb-h1"),
    (r"\bzb-?v\b|\bzbv\b", "zb-v"),
    (r"\bdualpipe", "dualpipe-v"),
    (r"\b1f1b-i\b|schedule=interleaved|^interleaved|\binterleaved 1f1b\b", "interleaved"),
    (r"\bgpipe\b", "gpipe"),
    (r"\b1f1b\b", "1f1b"),
)


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A published run, as the input of a prediction.

    Args:
        id, family: as in the file.
        shape, recipe, cluster: model, layout and machine of the run.
        convention: FLOPs convention of the row, as in the file.
        remarks: defaults that were assumed.
    """

    id: str
    family: str
    shape: ModelShape
    recipe: Recipe
    cluster: Cluster
    convention: str
    remarks: tuple[str, ...]


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Read all rows of a CSV file with a header: column -> cell, with spaces stripped.

    Raises:
        ValueError: a required column is missing, or there is no row.
    """
    with Path(path).open(newline="", encoding="utf-8-sig") as handle:
        reader = csv.DictReader(handle)
        columns = set(reader.fieldnames or ())
        if missing := [name for name in _NEEDED if name not in columns]:
            raise ValueError(f"`{path}` has no columns {missing}; the planner needs {', '.join(_NEEDED)} at least")
        rows = [{key: (value or "").strip() for key, value in row.items() if key is not None} for row in reader]
    if not rows:
        raise ValueError(f"`{path}` has a header and no rows; add a line for each run")
    return rows


def without_measurements(row: Mapping[str, str]) -> dict[str, str]:
    """The row without its measured columns."""
    return {name: value for name, value in row.items() if name not in MEASURED}


def run_from_row(row: Mapping[str, str], default_id: str = "row") -> PublishedRun:
    """Read the description of a run from a row.

    Args:
        row: the cells, by column; measured ones are ignored.
        default_id: name of the run if the row has no ``id``.

    Raises:
        ValueError: a required value is missing or a value is invalid; the message names row and column.
    """
    cells = without_measurements(row)
    name = cells.get("id") or default_id
    try:
        return _run_from_cells(cells, name)
    except ValueError as error:
        raise ValueError(f"row {name!r}: {error}") from error


def _run_from_cells(cells: Mapping[str, str], name: str) -> PublishedRun:
    """Read a run from cells without the measured columns."""
    remarks: list[str] = []
    precision = _precision(cells.get("precision", ""))
    cluster, remark = cluster_for(cells.get("gpu", ""), _number(cells, "peak_tflops"))
    if precision == "fp8" and not cluster.gpu.peak_8:
        precision = "bf16"
        remarks.append(f"fp8 is not available on {cluster.gpu.name}; predicted at bf16")
    if remark:
        remarks.append(remark)
    shape = _shape(cells, remarks)
    recipe = _recipe(cells, cluster, precision, shape, remarks)
    return PublishedRun(
        name,
        cells.get("family") or "unnamed",
        shape,
        recipe,
        cluster,
        cells.get("flops_convention", ""),
        tuple(remarks),
    )


def _number(cells: Mapping[str, str], column: str) -> float | None:
    """Number in a cell; None if the cell is empty or the column is missing.

    Raises:
        ValueError: the cell is not a positive number.
    """
    text = cells.get(column, "")
    if not text:
        return None
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        raise ValueError(f"`{column}={text}` is not a number; correct the cell or leave it empty") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"`{column}={text}` must be positive and finite; correct the cell or leave it empty")
    return value


def _integer(cells: Mapping[str, str], column: str) -> int | None:
    """Integer in a cell; None if the cell is empty.

    Raises:
        ValueError: the cell is not a positive integer.
    """
    value = _number(cells, column)
    if value is not None and value != int(value):
        raise ValueError(f"`{column}={value}` must be a whole number; correct the cell")
    return None if value is None else int(value)


def _needed(cells: Mapping[str, str], column: str) -> int:
    """Integer in a required cell.

    Raises:
        ValueError: the cell is empty or not a positive integer.
    """
    value = _integer(cells, column)
    if value is None:
        raise ValueError(f"column `{column}` is empty; a prediction needs it")
    return value


def _shape(cells: Mapping[str, str], remarks: list[str]) -> ModelShape:
    """The model of a row; by default the vocabulary is GPT-2's padded one, and ffn is 4h.

    Models without a gate have tied embeddings, as GPT; those without key/value heads have a position table too.
    """
    vocab = _integer(cells, "vocab")
    if vocab is None:
        remarks.append(f"vocabulary not given; taken as {_DEFAULT_VOCAB}")
    gated = cells.get("gated", "").lower() in ("1", "true", "yes", "1.0")
    return ModelShape(
        layers=_needed(cells, "layers"),
        hidden=_needed(cells, "hidden"),
        heads=_needed(cells, "heads"),
        vocab=vocab or _DEFAULT_VOCAB,
        seq=_needed(cells, "seq"),
        kv_heads=_integer(cells, "kv_heads"),
        ffn=_integer(cells, "ffn_hidden"),
        gated=gated,
        tied=not gated,
        positions=0 if gated or cells.get("kv_heads") else _needed(cells, "seq"),
        experts=_integer(cells, "experts") or 0,
        top_k=_integer(cells, "top_k") or 1,
        expert_inner=_integer(cells, "expert_hidden"),
        shared_inner=_integer(cells, "shared_hidden") or 0,
        moe_layers=_integer(cells, "moe_layers"),
        attention_parameters=_integer(cells, "attention_params"),
        head_dim=_integer(cells, "head_dim"),
    )


def _recipe(
    cells: Mapping[str, str], cluster: Cluster, precision: str, shape: ModelShape, remarks: list[str]
) -> Recipe:
    """The recipe of a row, with defaults for empty cells."""
    tensor, pipeline = _integer(cells, "tp") or 1, _integer(cells, "pp") or 1
    context = _integer(cells, "cp") or 1
    data = _integer(cells, "dp") or _data_from_world(cells, tensor * pipeline * context)
    gbs = _needed(cells, "gbs")
    sharding = _sharding(cells.get("shard", ""))
    software = _software(cells, cluster, sharding)
    chunks = _integer(cells, "vpp") or 1
    schedule = _schedule(cells, pipeline, chunks)
    if schedule == "interleaved" and chunks == 1:
        chunks = next((v for v in (2, 3, 4, 5) if shape.layers % (pipeline * v) == 0), 2)
        remarks.append(f"interleaved without chunks given; taken as {chunks}")
    if schedule == "interleaved" and shape.layers + 2 < pipeline * chunks:
        remarks.append(f"{chunks} chunks on {pipeline} stages are more than the layers; taken as 1")
        schedule, chunks = "1f1b", 1
    if schedule.startswith("zb"):
        software = replace(software, post_validation=True)
    text = cells.get("recompute", "").lower()
    recipe = Recipe(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        global_batch=gbs,
        chunks={"interleaved": chunks, "zb-v": 2, "dualpipe-v": 2}.get(schedule, 1),
        schedule=schedule,
        sharding=sharding,
        recompute=_recompute(text, software, sharding),
        sequence_parallel="+sp" in text or "sequence" in text or software.fused_attention,
        precision=precision,
        gradient_bytes=_gradient_bytes(cells.get("precision", "").lower(), software),
        software=software,
        expert=_integer(cells, "ep") or 1,
        context_method="ring",
        optimizer_offload=1.0 if "optimizer" in cells.get("offload", "").lower() else 0.0,
        activation_offload="inputs" if "activations" in cells.get("offload", "").lower() else None,
    )
    micro_batch = _integer(cells, "mbs") or _micro_batch(cells, shape, recipe, cluster, remarks)
    return replace(recipe, micro_batch=micro_batch)


def _data_from_world(cells: Mapping[str, str], model_ranks: int) -> int:
    """Data-parallel size from the number of GPUs; 1 if that is not given either.

    Raises:
        ValueError: the number of GPUs is not a multiple of ``model_ranks``.
    """
    world = _integer(cells, "n_gpus")
    if world is None:
        return 1
    if world % model_ranks:
        raise ValueError(f"`n_gpus={world}` is not a multiple of tp x pp x cp = {model_ranks}; correct one of these")
    return world // model_ranks


def _micro_batch(
    cells: Mapping[str, str], shape: ModelShape, recipe: Recipe, cluster: Cluster, remarks: list[str]
) -> int:
    """Micro-batch size if it is not given.

    It follows from the number of micro-batches, if that is given. Otherwise it is 1 with a pipeline; without one it is
    the largest that fits, as gradient accumulation has no advantage there.
    """
    per_replica = recipe.global_batch // recipe.data
    count = _integer(cells, "n_microbatches")
    if count is not None:
        return max(1, per_replica // count)
    found = 1
    if recipe.pipeline == 1:
        sizes = [size for size in range(1, min(per_replica, 64) + 1) if per_replica % size == 0]
        found = max((size for size in sizes if _fits(shape, replace(recipe, micro_batch=size), cluster)), default=1)
    remarks.append(f"micro-batch size not given; taken as {found}")
    return found


def _fits(shape: ModelShape, recipe: Recipe, cluster: Cluster) -> bool:
    """Whether the fullest rank fits into the GPU's memory."""
    share = recompute_share(shape, recipe, cluster)
    return peak_memory(shape, recipe, cluster, share).total <= cluster.gpu.memory


def _precision(text: str) -> str:
    """The planner's name of a row's precision; an empty cell is bf16."""
    text = text.lower()
    if "fp8" in text:
        return "fp8"
    if text in ("fp32", "tf32", "float32", "fp64"):
        return "fp64" if text == "fp64" else "fp32"
    return "fp16" if text.startswith("fp16") or text == "float16" else "bf16"


def _gradient_bytes(precision: str, software: Software) -> int:
    """Bytes per gradient element: 4 if the row states fp32 accumulation or runs bf16 in plain PyTorch, else 2.

    fp16 runs reduce gradients in fp16. FSDP reduces in 16 bits, and so do NVIDIA's recipes for the distributed
    optimizer.
    """
    if "fp32" in precision:
        return 4
    return 2 if precision.startswith("fp16") or software.name != PLAIN_3D.name else 4


def _sharding(text: str) -> str:
    """The planner's name of a row's sharding; an empty cell is ``none``.

    Raises:
        ValueError: the sharding is unknown.
    """
    text = text.lower().replace("-", "").replace("_", "")
    if "hsdp" in text:
        return "hsdp"
    if "fsdp" in text or "zero3" in text:
        return "fsdp"
    if "zero2" in text:
        return "zero2"
    if "zero1" in text or "dist" in text:
        return "zero1"
    if text in ("", "none", "zero0", "ddp"):
        return "none"
    raise ValueError(f"`shard={text}` is not known; use none, zero1, zero2, fsdp or hsdp")


def _recompute(text: str, software: Software, sharding: str) -> str:
    """The planner's name of a row's recomputation.

    An empty cell means ``none`` with fused attention (``auto`` for FSDP, whose trainers recompute by default), and
    ``full`` without it, as score matrices filled the memory.

    Raises:
        ValueError: the recomputation is unknown.
    """
    if not text:
        silent = "auto" if sharding in ("fsdp", "hsdp") else "none"
        return silent if software.fused_attention else "full"
    for name in ("full", "selective", "none"):
        if text.startswith(name):
            return name
    raise ValueError(f"`recompute={text}` is not known; use none, selective, selective+SP or full")


def _schedule(cells: Mapping[str, str], pipeline: int, chunks: int) -> str:
    """The schedule named in the ``schedule`` column, the notes or the id; otherwise by the number of chunks."""
    if pipeline == 1:
        return "1f1b"
    for column in ("schedule", "notes", "id"):
        text = cells.get(column, "").lower()
        for pattern, name in _SCHEDULE_WORDS:
            if re.search(pattern, text):
                return name if name != "1f1b" or chunks == 1 else "interleaved"
    return "interleaved" if chunks > 1 else "1f1b"


def _software(cells: Mapping[str, str], cluster: Cluster, sharding: str) -> Software:
    """Traits of the training stack of a row, from its sharding, precision and GPU.

    Sharded weights and gradients (``fsdp``, ``zero2``-like) mean PyTorch's FSDP, or ZeRO-3 in fp16 on GPUs older than
    Hopper. 8-bit products, a distributed optimizer, or ``zero2`` in other precisions than fp16, means Megatron-Core.
    All other runs on GPUs older than Hopper are Megatron-LM of 2021-22, before fused attention, with DeepSpeed if they
    shard.
    """
    shard = cells.get("shard", "").lower()
    precision = cells.get("precision", "").lower()
    old = cluster.gpu.generation in ("volta", "ampere")
    notes = cells.get("notes", "").lower()
    if sharding in ("fsdp", "hsdp") or "like" in shard:
        found = PYTORCH_FSDP
        if re.search(r"async ?tp", notes):
            found = replace(found, overlap_tensor=True)
        if re.search(r"torch\.compile", notes):
            found = replace(found, fused_kernels=True)
        if old and precision.startswith("fp16"):
            return DEEPSPEED_ZERO3 if "zero" in shard else replace(found, fused_attention=False)
        return found
    if precision.startswith("fp8"):  # 8-bit products outside of FSDP are Transformer Engine's
        return MEGATRON_CORE
    if "dist" in shard or (sharding == "zero2" and not precision.startswith("fp16")):
        return MEGATRON_CORE
    if old:
        return MEGATRON_2021 if sharding == "none" else MEGATRON_DEEPSPEED
    return PLAIN_3D
