"""Documents packed into rows: every token is there, predicted once, and knows its document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from lightning_megatron import data
from lightning_megatron.strategy.data.packing import IGNORED, pack_documents

DOCUMENTS = st.lists(st.lists(st.integers(1, 99), max_size=20), max_size=10)


@settings(deadline=None, max_examples=200)
@given(DOCUMENTS, st.integers(2, 9))
def test_every_token_but_the_first_is_predicted_exactly_once(documents: list[list[int]], length: int) -> None:
    rows = list(pack_documents(documents, length, filler=0, overlap=1))
    stream = [token for document in documents for token in document]
    assert all(len(row["input_ids"]) == length for row in rows)
    if len(stream) > 1:
        assert [token for row in rows for token in row["input_ids"][1:] if token] == stream[1:]
        assert not any(set(row["input_ids"][1:]) == {0} for row in rows)


@settings(deadline=None, max_examples=200)
@given(DOCUMENTS, st.integers(1, 9))
def test_without_an_overlap_rows_are_the_stream(documents: list[list[int]], length: int) -> None:
    rows = list(pack_documents(documents, length, filler=0, overlap=0))
    stream = [token for document in documents for token in document]
    assert [token for row in rows for token in row["input_ids"]][: len(stream)] == stream
    assert sum(sum(row["lengths"]) for row in rows) == len(stream)
    assert len(rows) == -(-len(stream) // length)


@settings(deadline=None, max_examples=200)
@given(DOCUMENTS, st.integers(2, 9))
def test_targets_are_the_later_tokens_of_each_document(documents: list[list[int]], length: int) -> None:
    rows = list(pack_documents(documents, length, filler=0, overlap=1))
    if rows:
        labels = data.CollatePacked()(rows)["labels"][:, 1:]
        assert labels[labels != IGNORED].tolist() == [t for document in documents for t in document[1:]]


def test_rows_positions_and_labels_are_those_of_the_drawing() -> None:
    rows = list(pack_documents([[1, 2, 3], [4, 5, 6, 7, 8]], 4, filler=9, overlap=1))
    batch = data.CollatePacked(mask=True)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 9, 9]]
    assert [row["lengths"] for row in rows] == [[3, 1], [4], [2]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[1, 2, 3, IGNORED], [4, 5, 6, 7], [7, 8, IGNORED, IGNORED]]
    assert batch["attention_mask"][0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    whole = data.CollatePacked(documents=False)(rows)
    assert whole["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 1]]
    assert whole["labels"].tolist() == [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, IGNORED, IGNORED]]


def test_a_hugging_face_model_sees_each_document_alone() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32, **sizes)).double()
    documents = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    wanted = torch.cat([model(torch.tensor([one])).logits[0] for one in documents])
    (row,) = pack_documents(documents, 14, filler=0, overlap=1)
    for mask in (False, True):
        batch = data.CollatePacked(mask=mask)([row, row])
        outcome = model(**batch, use_cache=False)
        torch.testing.assert_close(outcome.logits[1, :12], wanted, rtol=0, atol=1e-12)
        mean = functional.cross_entropy(
            torch.cat([model(torch.tensor([one])).logits[0, :-1] for one in documents]),
            torch.tensor([token for one in documents for token in one[1:]]),
        )
        torch.testing.assert_close(outcome.loss.double(), mean, rtol=0, atol=1e-6)


def _words(texts: list[str]) -> dict[str, Any]:
    return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def test_texts_become_the_same_rows_from_disk_and_from_a_stream(tmp_path: Path) -> None:
    texts = Dataset.from_dict({"text": [" ".join(map(str, range(1, 2 + i))) for i in range(7)], "more": [0] * 7})
    tokens = data.tokenise(texts, _words, end=99, longest=5)
    assert tokens.column_names == ["input_ids"]
    assert tokens[0]["input_ids"] == [1, 99] and tokens[6]["input_ids"] == [1, 2, 3, 4, 99]
    rows = data.pack(tokens, 4, filler=0, cache_dir=str(tmp_path))
    assert any(path.suffix == ".arrow" for path in tmp_path.rglob("*")), "mapped into memory"
    stream = data.pack(data.tokenise(texts.to_iterable_dataset(), _words, end=99, longest=5), 4, filler=0)
    for _ in range(2):
        assert list(stream) == rows.to_list()
    parts = data.pack(DatasetDict(train=tokens), 4, filler=0, cache_dir=str(tmp_path))
    assert parts["train"].to_list() == rows.to_list()


def test_a_stream_that_does_not_know_its_columns_is_left_with_tokens_alone() -> None:
    from datasets import IterableDataset

    stream = IterableDataset.from_generator(lambda: iter([{"text": "1 2", "more": 0}] * 3))
    assert stream.column_names is None
    assert list(data.tokenise(stream, _words)) == [{"input_ids": [1, 2]}] * 3


def test_sources_are_mixed_by_weights_and_no_row_comes_twice() -> None:
    def source(begin: int, count: int) -> Dataset:
        return Dataset.from_dict({"n": list(range(begin, begin + count))})

    sources = [source(0, 3000), source(10_000, 3000)]
    mixed = data.mix(sources, [3, 1], seed=1)
    numbers = mixed["n"][:]
    share = sum(number < 10_000 for number in numbers) / len(numbers)
    assert abs(share - 0.75) < 0.03
    assert len(set(numbers)) == len(numbers)
    streamed = data.mix([one.to_iterable_dataset() for one in sources], [0.6, 0.2], seed=1)
    assert [row["n"] for row in streamed] == numbers
    everything = data.mix([source(0, 5), source(10_000, 50)], [1, 1], until="all")["n"][:]
    assert set(everything) == {*range(5), *range(10_000, 10_050)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rows: data.mix([rows], [1, 2]), "1 sources have 2 weights"),
        (lambda rows: data.mix([rows, rows], [1, 0]), r"`weights=\[1, 0\]` must all be above 0"),
        (lambda rows: data.mix([rows], [1], until="never"), "must be 'first' or 'all'"),
        (lambda rows: data.tokenise(rows, _words), r"have the columns \['n'\]; `tokenise\(column='text'\)`"),
        (lambda rows: data.tokenise(rows, _words, column="n", longest=0), "`longest=0` must be at least 1"),
        (lambda rows: data.mix([rows, Dataset.from_dict({"m": [1]})], [1, 1]), r"the columns \['n'\] and \['m'\]"),
        (lambda rows: data.pack(rows, 4, filler=0), r"have the columns \['n'\], and `pack` needs `input_ids`"),
        (lambda rows: data.pack(rows, 4, filler=0, overlap=4), "`overlap=4` must be at least 0 and below `length=4`"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Dataset.from_dict({"n": [1]}))


def _packed(begin: int, count: int) -> Any:
    rows = Dataset.from_dict({"input_ids": [[begin + number] * 3 for number in range(count)]})
    return data.pack(rows.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=4), 4, filler=0)


def test_packed_streams_are_mixed_by_weights_in_the_same_order_again_and_in_another_one_by_epoch() -> None:
    mixed = data.mix([_packed(0, 3000), _packed(10_000, 3000)], [3, 1], seed=1)
    first = [row["input_ids"] for row in mixed]
    share = sum(tokens[0] < 10_000 for tokens in first) / len(first)
    assert abs(share - 0.75) < 0.03
    assert [row["input_ids"] for row in mixed] == first
    mixed.set_epoch(1)
    assert [row["input_ids"] for row in mixed] != first
    everything = {row["input_ids"][0] // 10_000 for row in data.mix([_packed(0, 4), _packed(10_000, 40)], [1, 1])}
    assert everything == {0, 1}
    whole = [row["input_ids"] for row in data.mix([_packed(0, 4), _packed(10_000, 40)], [1, 1], until="all")]
    assert all(row["input_ids"] in whole for source in (_packed(0, 4), _packed(10_000, 40)) for row in source)
    with pytest.raises(ValueError, match="Source 1 of `mix"):
        list(data.mix([_packed(0, 4), data.pack(iter(()), 4, filler=0)], [1, 1], until="all"))


def test_streams_by_split_are_tokenised_and_packed_by_split() -> None:
    from datasets import IterableDatasetDict

    splits = IterableDatasetDict({"train": Dataset.from_dict({"text": ["1 2 3"] * 4}).to_iterable_dataset()})
    packed = data.pack(data.tokenise(splits, _words), 4, filler=0)
    assert next(iter(packed["train"])) == {"input_ids": [1, 2, 3, 1], "lengths": [3, 1]}


def test_streams_that_are_not_shuffled_have_one_order() -> None:
    class Rows:
        def __iter__(self) -> Any:
            return iter([{"input_ids": [1, 2, 3]}] * 4)

    packed = data.pack(Rows(), 4, filler=0)
    packed.set_epoch(1)
    assert len(list(packed)) == len(list(packed)) == 4


def test_lists_are_refused_with_the_way_to_rows() -> None:
    for call in (lambda: data.tokenise([{"text": "1"}], _words), lambda: data.pack([{"input_ids": [1]}], 4, filler=0)):
        with pytest.raises(TypeError, match=r"was given a list; `datasets.Dataset.from_list"):
            call()
