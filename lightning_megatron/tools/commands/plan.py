"""``lightning-megatron plan``: ranks the layouts of a model by predicted speed, and shows their memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_megatron.tools.commands.conduct import check_plot, refusing, working

if TYPE_CHECKING:
    from lightning_megatron.planner.model.shape import ModelShape
    from lightning_megatron.planner.search.search import Plan

_LETTERS = {
    "t": "tensor ranks",
    "p": "stages",
    "v": "chunks per stage",
    "d": "replicas",
    "c": "context ranks",
    "b": "samples per micro-batch",
    "e": "expert ranks",
}


def plan(
    gpus: Annotated[int, typer.Option(help="GPUs to use.")],
    global_batch: Annotated[int, typer.Option(help="Sequences per optimizer step.")],
    gpu: Annotated[
        str | None, typer.Option(help="GPU by name: A100-40, A100-80 (the default), H100, H200, B200, V100-32.")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="YAML file that describes the cluster instead.")] = None,
    hf_config: Annotated[Path | None, typer.Option(help="Hugging Face config.json, or the folder it is in.")] = None,
    layers: Annotated[int | None, typer.Option(help="Transformer layers.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; all heads if left out.")] = None,
    ffn: Annotated[int | None, typer.Option(help="Inner size of the MLP; 4 x hidden if left out.")] = None,
    gated: Annotated[bool, typer.Option("--gated", help="The MLP has a gate (SwiGLU).")] = False,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary entries; 51200 if left out.")] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length; 2048, or the configuration's own.")] = None,
    untied: Annotated[bool, typer.Option("--untied", help="Embedding and output head are two matrices.")] = False,
    precision: Annotated[str, typer.Option(help="bf16, fp16 or fp8.")] = "bf16",
    schedule: Annotated[str | None, typer.Option(help="Only this pipeline schedule.")] = None,
    tensor: Annotated[int | None, typer.Option(help="Only this tensor-parallel size.")] = None,
    pipeline: Annotated[int | None, typer.Option(help="Only this pipeline size.")] = None,
    context: Annotated[int | None, typer.Option(help="Only this number of context ranks.")] = None,
    expert: Annotated[int | None, typer.Option(help="Only this number of ranks that share out experts.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Only this micro-batch size.")] = None,
    sharding: Annotated[
        str | None, typer.Option(help="Only this sharding: none, zero1 (optimizer) or fsdp (weights too).")
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload", help="Use host memory for activations and the optimizer where needed.")
    ] = False,
    headroom: Annotated[float, typer.Option(help="Share of memory to leave free.")] = 0.05,
    top: Annotated[int, typer.Option(help="Layouts to show.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write throughput and memory as SVG to this file.")] = None,
) -> None:
    """Rank all layouts of a model on a number of GPUs, and say why the best is best."""
    from lightning_megatron.pipeline.schedules.text import counted
    from lightning_megatron.planner.model.cluster import Cluster
    from lightning_megatron.planner.search.plot import plan_svg
    from lightning_megatron.planner.search.search import Limits
    from lightning_megatron.planner.search.search import plan as find_plan

    with refusing():
        check_plot(plot)
        if cluster and gpu:
            raise ValueError("`--cluster` says which GPUs there are, so `--gpu` has no meaning beside it; give one")
        machine = Cluster.from_yaml(cluster) if cluster else Cluster.named(gpu or "A100-80")
        shape = _shape(hf_config, layers, hidden, heads, kv_heads, ffn, gated, vocab, seq, untied)
        limits = Limits(
            schedules=(schedule,) if schedule else Limits().schedules,
            precision=precision,
            tensor=tensor,
            pipeline=pipeline,
            micro_batch=micro_batch,
            context=context,
            expert=expert,
            headroom=headroom,
            shardings=(sharding,) if sharding else Limits().shardings,
            offload=offload,
        )
        with working(f"trying layouts of {counted(gpus, 'GPU')}"):
            found = find_plan(shape, machine, gpus, global_batch, limits=limits, top=top)
        if plot:
            plot.write_text(plan_svg(found, limits), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
        return
    _print(found)
    if plot:
        typer.echo(f"wrote {plot}")


def _shape(
    config: Path | None,
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    kv_heads: int | None,
    ffn: int | None,
    gated: bool,
    vocab: int | None,
    seq: int | None,
    untied: bool,
) -> ModelShape:
    """The model's shape from its configuration file, or from flags.

    Raises:
        ValueError: there is no configuration file, and a required flag is missing; or there is one, and a flag that
            it leaves without meaning.
    """
    from lightning_megatron.planner.model.shape import ModelShape

    if config is not None:
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv-heads": kv_heads, "ffn": ffn, "vocab": vocab}
        flags = {"gated": gated or None, "untied": untied or None}
        given = [f"--{name}" for name, value in (sizes | flags).items() if value is not None]
        if given:
            raise ValueError(f"`--hf-config {config}` says all sizes but `--seq`; leave out {', '.join(given)}")
        return ModelShape.from_config(config, seq=seq)
    if layers is None or hidden is None or heads is None:
        raise ValueError("give --hf-config FILE, or all of --layers, --hidden and --heads")
    vocab, seq = 51200 if vocab is None else vocab, 2048 if seq is None else seq
    return ModelShape(layers, hidden, heads, vocab, seq, kv_heads, ffn, gated, not untied)


def _print(found: Plan) -> None:
    """Print the table and the explanation."""
    from rich.console import Console
    from rich.table import Table

    from lightning_megatron.pipeline.schedules.text import counted
    from lightning_megatron.planner.model.cluster import GIB

    title = (
        f"{found.shape.size} parameters on {found.gpus:,} {found.cluster.gpu.name}, "
        f"global batch {found.global_batch:,} ({counted(found.considered, 'layout')}, {found.too_large:,} too large)"
    )
    columns = (
        "",
        "layout",
        "schedule",
        "sharding",
        "recompute ...",
        "s/step",
        "tok/s/GPU",
        "MFU",
        "bubble",
        "GiB",
    )
    table = Table(*columns, title=title)
    for rank, item in enumerate(found.ranked, start=1):
        recipe = item.recipe
        words = [word for word in recipe.sizes().split() if word not in ("v1", "c1", "+sp")]
        words += ["+sp"] if recipe.sequence_parallel and recipe.tensor > 1 else []
        table.add_row(
            str(rank),
            " ".join(words),
            recipe.schedule if recipe.pipeline > 1 else "-",
            recipe.sharding,
            " ".join([recipe.recompute, *recipe.savings()]),
            f"{item.iteration_seconds:.3f}",
            f"{item.tokens_per_second / recipe.world:.0f}",
            f"{100 * item.mfu:.1f}%",
            f"{100 * max(0.0, item.breakdown.pipeline_bubble) / item.iteration_seconds:.1f}%",
            f"{item.memory.total / GIB:.0f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    letters = {word[0] for item in found.ranked for word in item.recipe.sizes().split()}
    named = ", ".join(f"{letter} {what}" for letter, what in _LETTERS.items() if letter in letters)
    console.print(f"Layouts: {named}; +sp sequence parallel.", style="dim")
    console.print(found.explanation)
