"""``lightning-megatron explain``: shows how a model's layers would be split, without any GPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_megatron.tools.commands.conduct import check_plot, read_json, refusing, working


def explain(
    hf_config: Annotated[Path, typer.Option(help="A Hugging Face config.json, or the folder that holds it.")],
    tensor: Annotated[int, typer.Option(min=1, help="Tensor-parallel size, t.")] = 2,
    sequence_parallel: Annotated[bool, typer.Option(help="Split activations along the sequence as well.")] = False,
    plan: Annotated[Path | None, typer.Option(help="A JSON file of pattern -> style instead of the own plan.")] = None,
    every_layer: Annotated[bool, typer.Option(help="List numbered layers one by one.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the plan as SVG into this file.")] = None,
) -> None:
    """Print the tensor-parallel plan of a Hugging Face model: modules, styles, shapes, collectives.

    Neither weights nor processes are needed: the model is built without
    memory, and one layer of each kind is tried with random weights.
    """
    if not hf_config.exists():  # before torch is imported, and before the hub is asked for a model of that name
        raise typer.BadParameter(f"`--hf-config {hf_config}`: there is no such file or folder here")
    read_json(hf_config / "config.json" if hf_config.is_dir() else hf_config, "--hf-config")
    with refusing():
        check_plot(plot)
    chosen: Any = "auto" if plan is None else read_json(plan, "--plan")
    with refusing(), working("reading the layers of the model"):
        from lightning_megatron.parallelize import explain as explain_module

        report = explain_module(_weightless_model(hf_config), tensor, chosen, sequence_parallel)
    if plot:
        from lightning_megatron.parallelize.picture import plan_picture

        with refusing():
            plot.write_text(plan_picture(report, every_layer), encoding="utf-8")
    typer.echo(report.explain(every_layer))


def _weightless_model(path: Path) -> Any:
    """Build the model of a config on the meta device: of its first known architecture, or a causal language model."""
    import torch

    try:
        import transformers
    except ImportError as error:
        raise typer.BadParameter("`--hf-config` needs the package transformers (pip install transformers).") from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = transformers.AutoConfig.from_pretrained(path)
    names = [name for name in getattr(config, "architectures", None) or [] if hasattr(transformers, name)]
    with torch.device("meta"):
        if names:
            return getattr(transformers, names[0])(config)
        return transformers.AutoModelForCausalLM.from_config(config)
