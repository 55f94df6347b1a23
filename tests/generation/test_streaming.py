"""Streamed weights: tokens, logits and losses are those without, and no more than two layers are in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import MegatronStrategy
from tests.generation.folders import TEXTS, commanded, expected, make_folder
from tests.generation.streams import KINDS, OPTIONS, meetings, odd, paddings, refusals, save_odd, streamed
from tests.harness import one_process, run_trainers

wide = pytest.mark.wide
FAMILIES = (
    *("llama", "gpt2", "qwen2", "qwen3", "gemma", "gemma3", "phi3", "opt", "mistral", "olmo2", "gpt_neox"),
    *("starcoder2", "falcon", "mixtral", "bloom"),
)
ALIKE = ["ABCD", "EFGH", "IJKL", "MNOP"]
"""Prompts that need no padding, with which BLOOM gives NaN in plain transformers."""
Sizes = tuple[int, int, int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def check(
    folder: Path,
    sizes: Sizes,
    streaming: Any,
    in_memory: bool = False,
    others: dict[str, Any] | None = None,
    texts: list[str] = TEXTS,
) -> None:
    devices = torch.Size(sizes).numel()
    ranks = run_trainers(streamed, str(folder), sizes, streaming, in_memory, others, texts, devices=devices)
    plain = one_process(streamed, str(folder), (1, 1, 1), None, False, None, texts)
    wanted = [expected(folder, texts, 2, max_new_tokens=6, **options) for options in OPTIONS]
    assert plain["tokens"] == wanted
    ahead = streaming["ahead"] if isinstance(streaming, dict) else 1
    for outcome in ranks:
        found = outcome.value
        assert found["tokens"] == wanted
        assert found["peak"] <= sum(found["largest"][: 1 + ahead]), found
        assert found["left"] == 0
        if sizes[1] == 1:
            torch.testing.assert_close(found["logits"], plain["logits"], rtol=1e-6, atol=1e-6)
        assert found["loss"] == pytest.approx(plain["loss"], rel=1e-6)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("sizes", "streaming"), [((1, 1, 1), "disk"), ((2, 1, 1), "cpu"), ((1, 1, 2), "disk")], ids=str
)
def test_streamed_weights_give_the_tokens_of_weights_in_memory(folder: Path, sizes: Sizes, streaming: str) -> None:
    check(folder, sizes, streaming)


@wide
@pytest.mark.parametrize(
    "streaming", ["cpu", "disk", {"from": "disk", "ahead": 0}, {"from": "cpu", "ahead": 2}], ids=str
)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (2, 1, 2)], ids=str)
def test_streaming_at_any_layout(folder: Path, sizes: Sizes, streaming: Any) -> None:
    check(folder, sizes, streaming)


@wide
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_streaming_of_a_family(family: str, sizes: Sizes, tmp_path: Path) -> None:
    check(make_folder(tmp_path / "model", family), sizes, "disk", texts=ALIKE if family == "bloom" else TEXTS)


@wide
@pytest.mark.parametrize(
    ("others", "sizes"),
    [
        *(({"mlp_chunks": 2}, sizes) for sizes in ((1, 1, 1), (2, 1, 1), (1, 1, 2))),
        *(({"activation_offload": "all"}, sizes) for sizes in ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 2, 1))),
    ],
    ids=str,
)
def test_streaming_beside_options_about_activations(others: dict[str, Any], sizes: Sizes, folder: Path) -> None:
    check(folder, sizes, "disk", others=others)


@wide
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1)], ids=str)
def test_weights_that_are_in_memory_are_streamed_from_there(folder: Path, sizes: Sizes) -> None:
    check(folder, sizes, "cpu", in_memory=True)


@pytest.mark.parametrize(
    ("kind", "streaming", "sizes"),
    [
        ("tied", "disk", (1, 1, 1)),
        ("functional", "cpu", (1, 1, 1)),
        *(
            pytest.param(kind, streaming, sizes, marks=wide)
            for kind in KINDS
            for streaming in ("disk", "cpu")
            for sizes in ((1, 1, 1), (2, 1, 1))
        ),
    ],
)
def test_modules_of_any_kind_predict_what_they_predict_in_memory(
    kind: str, streaming: str, sizes: Sizes, tmp_path: Path
) -> None:
    if sizes[0] > 1 and kind in ("backwards", "skips", "reads", "gradient", "shared", "twice"):
        pytest.skip("not a matter of streaming")
    path = None
    if streaming == "disk":
        path = str(tmp_path / "weights.safetensors")
        save_odd(kind, path)
    plain = one_process(odd, kind, None, None)
    for outcome in run_trainers(odd, kind, streaming, path, sizes, devices=sizes[0]):
        torch.testing.assert_close(outcome.value, plain, rtol=1e-9, atol=1e-12)


def test_padding_of_a_vocabulary_that_is_read_is_zero(folder: Path) -> None:
    """Memory comes uninitialized, and a row that no token is may hold NaN, which times zero is NaN."""
    for outcome in run_trainers(paddings, str(folder), devices=2):
        assert outcome.value, "the vocabulary is padded"
        assert all(padding == 0 for padding in outcome.value.values()), outcome.value


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_next_layer_is_read_while_one_computes(ahead: int) -> None:
    assert run_trainers(meetings, ahead, devices=1)[0].value == [ahead == 1] * 3


@pytest.mark.parametrize(
    ("what", "words", "devices"),
    [
        ("fit", "cannot be combined with `fit`", 1),
        ("no files", "nothing says from where", 1),
        pytest.param("no memory", "nothing says from where", 2, marks=wide),
        pytest.param("no layers", "found no layers", 1, marks=wide),
        pytest.param("checkpoint", "initial_weights", 1, marks=wide),
        pytest.param("save", "no state to save", 2, marks=wide),
        pytest.param("state", "no state to save", 1, marks=wide),
        pytest.param("pretrained", "no state to save", 1, marks=wide),
        pytest.param("again", "has left its weights out of memory", 2, marks=wide),
        pytest.param("differ", "they differ", 2, marks=wide),
    ],
)
def test_what_needs_weights_in_memory_is_refused(what: str, words: str, devices: int, folder: Path) -> None:
    if what == "checkpoint":
        from tests.generation.streams import FromFolder

        module = FromFolder(str(folder), in_memory=True)
        state = {"state_dict": module.state_dict(), "pytorch-lightning_version": "2.5.0", "loops": {}}
        torch.save(state, folder / "plain.ckpt")
    for outcome in run_trainers(refusals, what, str(folder), devices=devices):
        assert words in outcome.value, outcome.value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"weight_streaming": "gpu"}, "must be 'cpu', 'disk'"),
        ({"weight_streaming": {"from": "disk", "ahead": -1}}, "must be 'cpu', 'disk'"),
        ({"weight_streaming": {"to": "disk"}}, "must be 'cpu', 'disk'"),
        ({"weight_streaming": "cpu", "weight_sharding": True}, "`weight_sharding=True`"),
        ({"weight_streaming": "cpu", "compile_layers": True}, "`compile_layers=True`"),
        ({"weight_streaming": "cpu", "loss_chunks": 2}, "`loss_chunks=2`"),
    ],
    ids=str,
)
def test_options_that_cannot_be(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("`", ".").replace("(", ".")):
        MegatronStrategy(**arguments)


def test_the_command_streams(folder: Path) -> None:
    arguments = ["generate", "--hf", str(folder), "--prompt", "AB", "--max-new-tokens", "3", "--greedy", "--json"]
    plain = run_trainers(commanded, arguments, devices=1)[0].output
    found = run_trainers(commanded, [*arguments, "--stream", "disk"], devices=1)[0].output
    assert next(line for line in plain.splitlines() if line.startswith("{")) in found
