"""The example's data pipeline: what it promises about documents, blocks and its cache."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path

import corpus
import pytest
import torch
from corpus import END_OF_TEXT, CorpusDataModule, Recipe

from lightning_megatron.strategy.data import build_once


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Twelve documents of different lengths, and one file that is no text."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        words = " ".join(f"word{number}x{i}" for i in range(20 + 7 * number))
        (folder / f"document{number:02}.txt").write_text(f"Document {number}: ünïcödé {words}", encoding="utf-8")
    (folder / "picture.bin").write_bytes(bytes([0xFF, 0xFE, 0xFF]))
    return folder


def make_data(texts: Path, tmp_path: Path, **changes: object) -> CorpusDataModule:
    options = {"source": str(texts), "sequence": 16, "vocabulary": 300, "validation_fraction": 0.25, **changes}
    data = CorpusDataModule(Recipe(**options), tmp_path / "cache", batch_size=2, replicas=1, validation_blocks=1000)
    data.prepare_data()
    data.setup("fit")
    return data


def all_tokens(blocks: object) -> list[int]:
    """The token stream that was packed: of every block but the first, the shared first token is left out."""
    rows = [row.tolist() for row in blocks[:]["input_ids"]]
    return rows[0] + [token for row in rows[1:] for token in row[1:]]


def test_whole_documents_are_held_out_and_every_text_comes_back_from_its_tokens(texts: Path, tmp_path: Path) -> None:
    data = make_data(texts, tmp_path)
    end = data.tokenizer.token_to_id(END_OF_TEXT)
    found: dict[str, set[str]] = {}
    for name, blocks in (("train", data.train_blocks), ("validation", data.held_out)):
        stream = data.tokenizer.decode(all_tokens(blocks), skip_special_tokens=False)
        found[name] = {text for text in stream.split(END_OF_TEXT) if text}
    written = {path.read_text(encoding="utf-8") for path in texts.glob("*.txt")}
    assert end == 0
    assert found["train"] | found["validation"] == written
    assert not found["train"] & found["validation"]
    assert len(found["validation"]) == 3


def test_a_second_run_reads_the_blocks_of_the_first(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_data(texts, tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("the cache was built a second time")

    monkeypatch.setattr(corpus, "make_blocks", refuse)
    second = make_data(texts, tmp_path)
    assert torch.equal(first.train_blocks[:]["input_ids"], second.train_blocks[:]["input_ids"])
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.folder.name]


@pytest.mark.parametrize("changes", [{"sequence": 8}, {"vocabulary": 280}, {"seed": 1}, {"validation_fraction": 0.5}])
def test_other_options_get_blocks_of_their_own(texts: Path, changes: dict[str, object]) -> None:
    options = {"source": str(texts), "sequence": 16, "vocabulary": 300}
    assert Recipe(**options).key() != Recipe(**{**options, **changes}).key()


def test_a_changed_file_gets_blocks_of_its_own(texts: Path) -> None:
    recipe = Recipe(source=str(texts))
    before = recipe.key()
    assert recipe.key() == before
    os.utime(texts / "document00.txt", ns=(1, 1))
    assert recipe.key() != before


def test_of_two_processes_that_build_at_once_the_second_keeps_the_first_ones_blocks(
    texts: Path, tmp_path: Path
) -> None:
    data = make_data(texts, tmp_path)
    before = data.train_blocks[:]["input_ids"]
    aside = data.folder.rename(tmp_path / "aside")

    def make(scratch: Path, result: Path) -> None:
        corpus.make_blocks(data.recipe, scratch, result)
        aside.rename(data.folder)  # the other process is done first

    build_once(data.folder, make)
    data.setup("fit")
    assert torch.equal(before, data.train_blocks[:]["input_ids"])
    assert list((tmp_path / "cache").iterdir()) == [data.folder]


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "only.bin").write_bytes(b"\xff\xff")
    (tmp_path / "texts" / "only.txt").write_text("one document")
    recipe = Recipe(source=str(tmp_path / "texts"))
    with pytest.raises(ValueError, match=r"1 document\(s\); at least 2"):
        build_once(tmp_path / "cache" / "key", partial(corpus.make_blocks, recipe))
    assert not list((tmp_path / "cache").iterdir())


def test_no_held_out_block_counts_twice_when_replicas_share_them(texts: Path, tmp_path: Path) -> None:
    data = make_data(texts, tmp_path)
    blocks = len(data.held_out)
    data.replicas, data.validation_blocks = 2, blocks - 1 if blocks % 2 == 0 else blocks
    data.setup("fit")
    assert len(data.held_out) == data.validation_blocks - 1


def test_a_corpus_smaller_than_a_batch_is_refused(texts: Path, tmp_path: Path) -> None:
    data = make_data(texts, tmp_path)
    data.batch_size = 1000
    with pytest.raises(ValueError, match=r"fewer than the 1000 of a batch; .* smaller `--batch`"):
        data.setup("fit")


def test_a_single_file_is_split_at_its_paragraphs(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("\n\n".join(f"Paragraph {i} of the book." for i in range(10)))
    assert len(corpus.load_documents(str(file), tmp_path / "scratch")) == 10


def test_a_table_needs_a_text_column(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"words": "a"}\n{"words": "b"}\n')
    with pytest.raises(ValueError, match=r"has the columns \['words'\]; one named 'text' is needed"):
        corpus.load_documents(str(file), tmp_path / "scratch")
    file.write_text('{"text": "a", "other": 1}\n{"text": "b", "other": 2}\n')
    assert corpus.load_documents(str(file), tmp_path / "scratch")["text"] == ["a", "b"]


def test_a_path_that_is_not_there_is_refused_before_anything_is_downloaded() -> None:
    with pytest.raises(ValueError, match=r"`--data \./nowhere`: there is no such file or folder"):
        Recipe(source="./nowhere").key()


def test_a_name_that_is_neither_here_nor_on_the_hub_is_refused_with_both_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no way to the hub")

    monkeypatch.setattr(corpus, "load_dataset", unreachable)
    with pytest.raises(
        ValueError, match=r"no file or folder here, and as a dataset it could not .*: no way to the hub"
    ):
        corpus.load_documents("nobody/nothing", tmp_path)


def test_unigram_entropy_of_known_frequencies() -> None:
    assert corpus.unigram_entropy(torch.tensor([[0, 1], [2, 3]])) == pytest.approx(math.log(4), abs=1e-12)
    assert corpus.unigram_entropy(torch.tensor([5, 5, 5])) == 0
    assert corpus.unigram_entropy(torch.tensor([0, 0, 0, 1])) == pytest.approx(
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), abs=1e-12
    )
