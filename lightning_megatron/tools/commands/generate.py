"""``lightning-megatron generate``: continues prompts with a model that is divided over processes of this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_megatron.tools.commands.conduct import refusing, working


def generate(
    hf: Annotated[Path | None, typer.Option(help="Folder of a Hugging Face model.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="A checkpoint of a Hugging Face model; needs --tokenizer.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of the tokenizer; by default --hf.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A text to continue; may be repeated.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='File of texts: lines, or in .jsonl lines such as {"prompt": "..."}.')
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines to write; goes on where an earlier run stopped.")] = None,
    tensor: Annotated[int, typer.Option(min=1, help="Ranks that share each layer.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Stages that the layers are cut into.")] = 1,
    data: Annotated[int, typer.Option(min=1, help="Replicas, which share the prompts; needs --out.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens that follow a prompt.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 8,
    groups: Annotated[
        int | None, typer.Option(min=1, help="Batches that a pipeline has under way at once; by default its stages.")
    ] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Run prompts in pieces of so many tokens, between the tokens of others.")
    ] = None,
    prefill_batch: Annotated[
        int | None, typer.Option(min=1, help="Run prompts so many at a time, fewer than tokens are decoded in.")
    ] = None,
    sample: Annotated[
        bool | None, typer.Option("--sample/--greedy", help="By default as the model's generation config says.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from so many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from tokens of this probability in all.")] = None,
    beams: Annotated[int | None, typer.Option(min=1, help="Beams of a search.")] = None,
    seed: Annotated[int, typer.Option(help="Of random numbers; batch k draws from seed + k.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="Type of the weights, e.g. bfloat16; by default the model's.")
    ] = None,
    stream: Annotated[str | None, typer.Option(help="cpu or disk: weights stay there until their layer runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Continue prompts with a Hugging Face model or a checkpoint of one, on tensor x pipeline x data processes.

    Tokens are those of the model's own generate in one process, with prompts in the same batches.
    """
    sampling = {"do_sample": sample, "temperature": temperature, "top_k": top_k, "top_p": top_p, "num_beams": beams}
    sampling["prefill_chunk_size"] = prefill_chunk
    options = {name: value for name, value in sampling.items() if value is not None}
    options["max_new_tokens"] = max_new_tokens
    with refusing():  # on every rank, before torch is imported
        _check_arguments(hf, checkpoint, tokenizer, out, data, as_json)
        texts = _texts(prompt, prompts)
        _check_sampling(sample, options)
        if stream not in (None, "cpu", "disk"):
            raise ValueError(f"`--stream {stream}` must be cpu or disk; leave it out to keep weights in memory.")
    source = str(checkpoint or hf)
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    asked = {"weights": source, "prompts": digest, "batch": batch, "seed": seed, "dtype": dtype, "options": options}
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "data_parallel_size": data}
    with refusing(), working(f"reading {source}"):
        from lightning_megatron.strategy.generation.files import check_out
        from lightning_megatron.strategy.generation.lists import groups_of
        from lightning_megatron.strategy.generation.offline import Job, complete

        config, generation = _configs(hf, checkpoint)
        words = _tokenizer(tokenizer or hf)
        ids = [words(text)["input_ids"] for text in texts]
        kind, about = _dtype(dtype, config), (asked, as_json)
        given = source, config, kind, generation, words, texts, ids, batch, seed, options, sizes, out, *about, stream
        job = Job(*given, groups_of(groups or "auto", pipeline), prefill_batch)
        model = job.build()
        job.requests(model)
        job.check_weights(model)
        job.check_layout(model)
        if out is not None:
            check_out(out, asked)
    complete(job)


def _check_arguments(
    hf: Path | None, checkpoint: str | None, tokenizer: Path | None, out: Path | None, data: int, as_json: bool
) -> None:
    """Refuse what does not go together, and folders that are not there.

    Raises:
        ValueError: names the option.
    """
    if (hf is None) == (checkpoint is None):
        raise ValueError("give one of `--hf FOLDER` and `--checkpoint DIRECTORY`.")
    if hf is not None and not hf.is_dir():
        raise ValueError(f"`--hf {hf}`: there is no such folder; a model is not downloaded here.")
    if hf is not None and not (hf / "config.json").is_file():
        raise ValueError(f"`--hf {hf}`: there is no config.json in it.")
    if hf is not None and not any(hf.glob("*.safetensors")):
        raise ValueError(f"`--hf {hf}`: there are no .safetensors in it.")
    if checkpoint is not None and "://" not in checkpoint and not Path(checkpoint).exists():
        raise ValueError(f"`--checkpoint {checkpoint}`: there is no checkpoint.")
    if checkpoint is not None and tokenizer is None:
        raise ValueError("a checkpoint has no tokenizer; name the folder of one with `--tokenizer`.")
    if tokenizer is not None and not tokenizer.is_dir():
        raise ValueError(f"`--tokenizer {tokenizer}`: there is no such folder.")
    if data > 1 and out is None:
        raise ValueError(f"`--data {data}`: replicas write their texts to files; name one with `--out`.")
    if as_json and out is not None:
        raise ValueError("`--json` is for what is printed, and `--out` writes JSON lines already.")


def _check_sampling(sample: bool | None, options: Mapping[str, Any]) -> None:
    """Refuse options of sampling where nothing is sampled: they would change nothing."""
    given = [f"`--{name.replace('_', '-')}`" for name in ("temperature", "top_k", "top_p") if name in options]
    if given and sample is not True:
        raise ValueError(f"{', '.join(given)} needs `--sample`.")


def _texts(prompt: list[str] | None, file: Path | None) -> list[str]:
    """The prompts of the command line and of the file.

    Raises:
        ValueError: there is none, or a line of the file holds none.
    """
    texts = list(prompt or [])
    if file is not None:
        lines = [line for line in _read(file).splitlines() if line.strip()]
        texts += [_text(line, at, file) if file.suffix == ".jsonl" else line for at, line in enumerate(lines, start=1)]
    if not texts:
        raise ValueError("there is no prompt; give `--prompt TEXT` or `--prompts FILE`.")
    return texts


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"`--prompts {file}` is no text in UTF-8: {error.reason} at byte {error.start}.") from error


def _text(line: str, number: int, file: Path) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"`--prompts {file}`: line {number} is not JSON: {error}") from error
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f'`--prompts {file}`: line {number} has no text under "prompt".')
    return text


def _configs(hf: Path | None, checkpoint: str | None) -> tuple[Any, Any]:
    """The model's config and its generation config, which may be ``None``.

    Raises:
        ValueError: a checkpoint holds no Hugging Face model, or several, or one with adapters.
    """
    from transformers import AutoConfig, GenerationConfig

    from lightning_megatron.checkpoints.files.sources import open_source

    try:
        about = open_source(str(checkpoint or hf)).about
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if hf is not None:
        there = (hf / "generation_config.json").is_file()
        return AutoConfig.from_pretrained(hf), GenerationConfig.from_pretrained(hf) if there else None
    found = about.get("huggingface", {})
    if len(found) != 1:
        raise ValueError(
            f"the checkpoint holds {len(found)} Hugging Face models ({', '.join(sorted(found)) or 'none'}), and one is "
            "needed; export the one that is meant with `lightning-megatron checkpoint export`, and give it with `--hf`."
        )
    if any(about.get("adapters", {}).values()):
        raise ValueError(
            "the checkpoint's model has adapters; write it with `lightning-megatron checkpoint export "
            "--merge-adapters`, and give the folder with `--hf`."
        )
    ((prefix, stored),) = found.items()
    options = about.get("generation", {}).get(prefix)
    config = AutoConfig.for_model(**stored)
    return config, None if options is None else GenerationConfig.from_dict(options)


def _tokenizer(folder: Path | None) -> Any:
    """The tokenizer in a folder.

    Raises:
        ValueError: there is none that can be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"`{folder}` has no tokenizer that can be read; name one with `--tokenizer`. {first}"
        ) from error


def _dtype(name: str | None, config: Any) -> Any:
    """The type that weights are to have.

    Raises:
        ValueError: there is no such type.
    """
    import torch

    chosen = getattr(torch, name, None) if name is not None else getattr(config, "dtype", None) or torch.float32
    chosen = getattr(torch, chosen, None) if isinstance(chosen, str) else chosen
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise ValueError(f"`--dtype {name}` is no type of torch for weights; use float32, float16 or bfloat16.")
    return chosen
