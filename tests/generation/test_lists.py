"""Lists of prompts, from the command line and from a script, are continued as plain Hugging Face continues them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lightning_megatron.strategy.generation import files
from lightning_megatron.tools.commands.cli import app
from tests.generation.folders import (
    SAMPLED,
    TEXTS,
    commanded,
    expected,
    interrupted,
    listed,
    make_folder,
    make_tokenizer,
    refused,
    train,
)
from tests.generation.side_by_side import NEW, counted, failing, own_ends
from tests.harness import run_trainers

wide = pytest.mark.wide
FLAGS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "greedy": (["--greedy"], {"do_sample": False}),
    "sampled": (["--sample", "--temperature", "1.5", "--top-k", "20"], SAMPLED),
    "beams": (["--greedy", "--beams", "3"], {"do_sample": False, "num_beams": 3}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return file


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run(folder: Path, prompts: Path, sizes: tuple[int, int, int], *more: str, function: Any = commanded) -> Any:
    tensor, pipeline, data = sizes
    layout = f"--tensor {tensor} --pipeline {pipeline} --data {data}".split()
    arguments = ["generate", "--hf", str(folder), "--prompts", str(prompts), "--batch", "2", "--max-new-tokens", "6"]
    return run_trainers(function, [*arguments, *layout, *more], devices=tensor * pipeline * data)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("sizes", "mode"),
    [
        ((1, 2, 1), "greedy"),
        ((2, 1, 1), "sampled"),
        *(
            pytest.param(sizes, mode, marks=wide)
            for sizes in ((1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 4, 1))
            for mode in FLAGS
        ),
    ],
)
def test_printed_tokens_are_those_of_plain_hugging_face(
    folder: Path, prompts: Path, sizes: tuple[int, int, int], mode: str
) -> None:
    flags, options = FLAGS[mode]
    first, *others = run(folder, prompts, sizes, "--json", *flags)
    found = lines_of(first.output)
    assert [line["prompt"] for line in found] == TEXTS
    assert [line["tokens"] for line in found] == expected(folder, TEXTS, 2, max_new_tokens=6, **options)
    assert all(other.value == 0 and not lines_of(other.output) for other in others), "only rank 0 prints"


def test_strings_that_end_a_text_end_it(prompts: Path, tmp_path: Path) -> None:
    folder, greedy = make_folder(tmp_path / "model"), {"max_new_tokens": 6, "do_sample": False}
    free = expected(folder, TEXTS, 2, **greedy)
    file = folder / "generation_config.json"
    ends = {"stop_strings": [make_tokenizer().decode(free[1][2])], "pad_token_id": 60}
    file.write_text(json.dumps({**json.loads(file.read_text()), **ends}))
    found = lines_of(run(folder, prompts, (1, 2, 1), "--json", "--greedy")[0].output)
    padded = expected(folder, TEXTS, 2, tokenizer=make_tokenizer(), **greedy)
    unpadded = [row[: max(at for at, token in enumerate(row, start=1) if token != 60)] for row in padded]
    assert [line["tokens"] for line in found] == unpadded != free


def test_batches_under_way_at_once_end_where_the_first_rank_ends_them() -> None:
    alone, *others = [outcome.value for groups in (1, 3) for outcome in run_trainers(own_ends, groups, devices=2)]
    assert all(other == alone for other in others) and len(set(map(len, alone))) > 1


@wide
@pytest.mark.parametrize("more", [("--prefill-chunk", "3"), ("--groups", "1"), ("--groups", "3")], ids=str)
@pytest.mark.parametrize("mode", FLAGS)
def test_tokens_depend_on_neither_pieces_of_prompts_nor_groups(
    mode: str, more: tuple[str, str], folder: Path, prompts: Path
) -> None:
    flags, options = FLAGS[mode]
    found = lines_of(run(folder, prompts, (1, 2, 1), "--json", *flags, *more)[0].output)
    assert [line["tokens"] for line in found] == expected(folder, TEXTS, 2, max_new_tokens=6, **options)


@pytest.mark.parametrize(
    ("mode", "family", "sizes", "more"),
    [
        ("sampled", "llama", (1, 2, 1), ()),
        *(
            pytest.param(*row, marks=wide)
            for row in (
                ("greedy", "llama", (1, 1, 1), ()),
                ("beams", "llama", (1, 2, 1), ()),
                ("sampled", "llama", (2, 2, 1), ("--prefill-chunk", "2")),
                ("beams", "gemma3", (1, 2, 1), ()),
                ("greedy", "mistral", (2, 1, 1), ()),
                ("greedy", "gpt2", (1, 2, 2), ("--out", "out.jsonl")),
            )
        ),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_batches_of_prefill(
    mode: str, family: str, sizes: tuple[int, int, int], more: tuple[str, ...], prompts: Path, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "model", family)
    (flags, options), out = FLAGS[mode], tmp_path / "out.jsonl"
    more = ("--batch", "4", "--prefill-batch", "2", *(str(out) if part == "out.jsonl" else part for part in more))
    first, *_ = run(folder, prompts, sizes, *flags, *more, *(() if "--out" in more else ("--json",)))
    found = lines_of(out.read_text() if "--out" in more else first.output)
    assert [line["tokens"] for line in found] == expected(folder, TEXTS, 4, max_new_tokens=6, **options)


@pytest.mark.parametrize(("sizes", "count"), [((1, 2, 2), 7), pytest.param((1, 1, 2), 1, marks=wide)])
def test_replicas_share_the_prompts_and_write_one_file(
    folder: Path, prompts: Path, sizes: tuple[int, int, int], count: int, tmp_path: Path
) -> None:
    prompts.write_text("".join(f'"{text}"\n' for text in TEXTS[:count]))
    out = tmp_path / "out.jsonl"
    assert all(outcome.value == 0 for outcome in run(folder, prompts, sizes, "--out", str(out)))
    found = lines_of(out.read_text())
    assert [line["index"] for line in found] == list(range(count)) and not files.parts(out)
    assert [line["tokens"] for line in found] == expected(folder, TEXTS[:count], 2, max_new_tokens=6)


@wide
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1)], ids=str)
@pytest.mark.parametrize(
    "family", ["gpt2", "qwen2", "qwen3", "gemma", "gemma3", "phi3", "opt", "mistral", "olmo2", "gpt_neox"]
)
def test_tokens_of_a_family_are_those_of_plain_hugging_face(
    family: str, sizes: tuple[int, int, int], prompts: Path, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "model", family)
    for flags, options in FLAGS.values():
        found = lines_of(run(folder, prompts, sizes, "--json", *flags)[0].output)
        assert [line["tokens"] for line in found] == expected(folder, TEXTS, 2, max_new_tokens=6, **options)


def test_a_run_that_was_killed_goes_on_where_it_stopped(folder: Path, prompts: Path, tmp_path: Path) -> None:
    out, flags = tmp_path / "out.jsonl", ("--out", str(tmp_path / "out.jsonl"), *FLAGS["sampled"][0])
    run(folder, prompts, (1, 1, 1), *flags, function=interrupted)
    (part,) = files.parts(out)
    header, *wanted = part.read_text().splitlines()
    marked = [line.replace('"tokens": [', '"tokens": [7, ') for line in wanted[:2]]
    part.unlink()
    part = files.part_of(out, 3)  # of another layout, and torn
    part.write_text("\n".join((header, *marked, wanted[2][:20])))
    run(folder, prompts, (1, 2, 1), *flags)
    found = lines_of(out.read_text())
    assert [line["tokens"][0] for line in found[:2]] == [7, 7], "what is there is not generated again"
    assert found[2:] == lines_of("\n".join(wanted))[2:]
    out.rename(part).write_text(header + "\n")
    result = CliRunner().invoke(app, ["generate", "--hf", str(folder), "--prompt", "A", "--out", str(out)])
    assert result.exit_code == 2 and "begun with other values of prompts, batch, options" in result.stderr


def test_a_checkpoint_generates_as_its_export(folder: Path, prompts: Path, tmp_path: Path) -> None:
    path, exported = str(tmp_path / "step.ckpt"), tmp_path / "exported"
    run_trainers(train, str(folder), path, devices=2)
    done = CliRunner().invoke(
        app, ["checkpoint", "export", path, str(exported), "--tokenizer", str(folder)], catch_exceptions=False
    )
    assert done.exit_code == 0
    sizes = ["--batch", "2", "--max-new-tokens", "6", "--pipeline", "2", "--json"]
    arguments = ["generate", "--checkpoint", path, "--tokenizer", str(folder), "--prompts", str(prompts), *sizes]
    found = lines_of(run_trainers(commanded, arguments, devices=2)[0].output)
    assert [line["tokens"] for line in found] == expected(exported, TEXTS, 2, max_new_tokens=6)
    assert expected(exported, TEXTS, 2, max_new_tokens=6) != expected(folder, TEXTS, 2, max_new_tokens=6)


@wide
@pytest.mark.launch
def test_the_command_starts_its_own_ranks(folder: Path) -> None:
    program = [sys.executable, "-m", "lightning_megatron", "generate", "--hf", str(folder), "--prompt", "ABC", "--json"]
    done = subprocess.run([*program, "--pipeline", "2"], capture_output=True, text=True, timeout=240, check=True)
    (line,) = map(json.loads, done.stdout.splitlines())
    assert "available" not in done.stderr and "predict" not in done.stderr, done.stderr
    assert line["tokens"] == expected(folder, ["ABC"], max_new_tokens=64)[0]


REFUSED = [
    ([], "give one of `--hf FOLDER` and `--checkpoint DIRECTORY`"),
    (["--hf", "absent", "--prompt", "A"], "there is no such folder"),
    (["--hf", "empty", "--prompt", "A"], "there is no config.json in it"),
    (["--hf", "MODEL"], "there is no prompt"),
    (["--hf", "MODEL", "--prompt", "A", "--temperature", "2"], "`--temperature` needs `--sample`"),
    (["--hf", "MODEL", "--prompt", "A", "--data", "2"], "name one with `--out`"),
    (["--hf", "MODEL", "--prompt", "A", "--out", "absent/out"], "there is no folder absent"),
    (["--hf", "MODEL", "--prompt", "A", "--out", "full.jsonl"], "is there already, and complete"),
    (["--hf", "MODEL", "--prompt", "A", "--dtype", "int8"], "`--dtype int8` is no type of torch for weights"),
    (["--hf", "MODEL", "--prompt", "A" * 300], "prompt 0 has 300 tokens and 64 are to follow"),
    (["--hf", "MODEL", "--prompts", "wrong.jsonl"], 'line 1 has no text under "prompt"'),
    (["--hf", "MODEL", "--prompts", "bytes.txt"], "`--prompts bytes.txt` is no text in UTF-8: invalid start byte"),
    (["--hf", "MODEL", "--tokenizer", "wide", "--prompt", "A"], "they do not belong together"),
    (["--hf", "MODEL", "--tokenizer", "empty", "--prompt", "A"], "has no tokenizer that can be read"),
    (["--hf", "wide", "--prompt", "A"], "there is no config.json in it"),
    (["--hf", "t5", "--prompt", "A"], "no model that continues a text"),
    (["--hf", "weightless", "--tokenizer", "MODEL", "--prompt", "A"], "there are no .safetensors in it"),
    (["--checkpoint", "absent", "--tokenizer", "MODEL", "--prompt", "A"], "there is no checkpoint"),
    (["--checkpoint", "MODEL", "--prompt", "A"], "a checkpoint has no tokenizer"),
    (["--hf", "renamed", "--tokenizer", "MODEL", "--prompt", "A"], "do not fit: missing ['lm_head.weight']"),
    (["--hf", "mamba", "--tokenizer", "MODEL", "--prompt", "A", "--pipeline", "2"], "keeps states"),
    (["--hf", "MODEL", "--prompt", "A", "--pipeline", "9"], "fewer than the 9 pipeline stages"),
    (["--hf", "MODEL", "--prompt", "A", "--tensor", "7"], "not divisible by the tensor-parallel size 7"),
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    place = tmp_path_factory.mktemp("refused")
    for name in ("empty", "wide", "t5", "mamba", "weightless"):
        (place / name).mkdir()
    (place / "MODEL").symlink_to(folder)
    make_tokenizer(500).save_pretrained(place / "wide")
    (place / "t5" / "config.json").write_text(json.dumps({"model_type": "t5", "d_model": 8}))
    (place / "weightless" / "config.json").write_text((folder / "config.json").read_text())
    make_tokenizer().save_pretrained(place / "t5")
    save_file({"a": torch.zeros(1)}, place / "t5" / "model.safetensors")
    make_mamba(place / "mamba")
    weights = make_folder(place / "renamed") / "model.safetensors"
    tensors = load_file(weights)
    save_file({name.replace("lm_head", "head"): tensor for name, tensor in tensors.items()}, weights, {"format": "pt"})
    (place / "full.jsonl").write_text("")
    (place / "wrong.jsonl").write_text('{"text": "A"}\n')
    (place / "bytes.txt").write_bytes(b"A\xff\n")
    return place


def make_mamba(folder: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    MambaForCausalLM(MambaConfig(vocab_size=64, **sizes)).save_pretrained(folder)


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=lambda value: " ".join(value)[:60])
def test_what_cannot_be_is_told_in_one_line_before_any_work(
    arguments: list[str], words: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert result.exit_code == 2, result.output
    assert words in result.stderr.splitlines()[0], result.stderr
    assert len(result.stderr.splitlines()) <= 2


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 1, 1), SAMPLED),
        pytest.param((2, 2, 1), {}, marks=wide),
        pytest.param((2, 1, 2), {"num_beams": 2}, marks=wide),
        pytest.param((1, 2, 2), SAMPLED, marks=wide),
    ],
    ids=str,
)
def test_a_script_generates_for_a_list_on_every_rank(
    sizes: tuple[int, int, int], options: dict[str, Any], folder: Path
) -> None:
    wanted = expected(folder, TEXTS, 2, max_new_tokens=6, **options)
    words = make_tokenizer()
    for outcome in run_trainers(listed, str(folder), sizes, options, devices=torch.Size(sizes).numel()):
        tokens, texts, unchanged = outcome.value
        assert tokens == wanted
        assert texts == [words.decode(row, skip_special_tokens=True) for row in wanted] and unchanged


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=wide)])
def test_stages_do_not_idle_while_others_decode(stages: int) -> None:
    batches = 3 * stages
    for outcome in run_trainers(counted, stages, batches, stages, devices=stages):
        waves, busy = outcome.value
        assert busy == NEW * batches, "one turn for each token of each batch"
        assert busy / waves > 0.85, (waves, busy)
    assert counted_alone(stages, batches) == {None}


def counted_alone(stages: int, batches: int) -> set[Any]:
    return {outcome.value for outcome in run_trainers(counted, stages, batches, 1, devices=stages)}


@wide
@pytest.mark.parametrize("fails", ["at once", "later", "one stage"])
def test_a_failure_in_one_group_ends_the_others(fails: str) -> None:
    outcomes = run_trainers(failing, fails, devices=2, check=False, grace=20)
    told = [f"{outcome.value}\n{outcome.error}" for outcome in outcomes]
    assert not any("killed" in each or "nothing" in each for each in told), told
    assert "too much" in told[0] and (fails == "one stage" or "too much" in told[1]), told


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        (["AB"], {}, "need a `tokenizer=`"),
        *(
            pytest.param(*row, marks=wide)
            for row in (
                ("AB", {}, "must be a list"),
                ([[1, 999]], {}, "prompt 0 has token 999"),
                ([[]], {}, "prompt 0 has no tokens"),
                ([[1]], {"streamer": None}, "`streamer` cannot be given"),
                ([[1]], {"groups": 0}, "`groups=0` must be 'auto' or the number of batches in flight"),
                ([[1]], {"batch_size": 0}, "`batch_size=0` must be at least 1"),
                ([[1]], {"prefill_batch_size": 0}, "`prefill_batch_size=0` must be at least 1"),
                ([[1]], {"prefill_batch_size": 1, "use_cache": False}, "puts key-value caches that grow together"),
                ([[1]], {"prefill_batch_size": 1, "cache_implementation": "static"}, "a dynamic cache"),
                ([[1]], {"max_new_tokens": 0}, "`max_new_tokens=0` must be at least 1"),
                ([[1]], {"cache_implementation": "quantized"}, "'quantized'` is not supported under a pipeline"),
            )
        ),
    ],
)
def test_lists_that_cannot_be_are_refused_on_every_rank(
    prompts: Any, options: dict[str, Any], words: str, folder: Path
) -> None:
    for outcome in run_trainers(refused, str(folder), prompts, options, devices=2):
        assert words in outcome.value


@wide
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data_parallel_size": 2, "weight_sharding": True}, "`weight_sharding=True` makes replicas take part"),
        ({"context_parallel_size": 2}, "`context_parallel_size` cannot split single tokens"),
    ],
    ids=str,
)
def test_layouts_that_cannot_generate_lists_are_refused(arguments: dict[str, Any], words: str, folder: Path) -> None:
    for outcome in run_trainers(refused, str(folder), [[1, 2]], {}, arguments, devices=2):
        assert words in outcome.value
