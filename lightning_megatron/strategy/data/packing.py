"""Documents of any length packed into rows of one length, without losing where one ends and the next begins.

A row of the result has ``input_ids`` and ``lengths``, those of the documents, or parts of documents, in it. From these
two :class:`CollatePacked` makes what a model needs to keep documents apart::

    documents     a b c | d e f g h         length=4, overlap=1, filler=.
    input_ids     [a b c d]   [d e f g]   [g h . .]
    lengths       [3, 1]      [4]         [2]
    position_ids  0 1 2 0     0 1 2 3     0 1 0 1
    labels        a b c -     d e f g     g h - -       (- is not a target; the first of a row never is)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.strategy.data.rows import OwnStream, is_stream, is_stream_of_splits, needs_datasets

IGNORED = -100
"""The label that `torch.nn.functional.cross_entropy` leaves out."""


def pack(rows: Any, length: int, *, filler: int, overlap: int = 1, **options: Any) -> Any:
    """Lay tokenised documents end to end, and cut them into rows of ``length`` tokens.

    What is on disk is cached by ``datasets`` and shows a progress bar; a stream is packed while it is read.

    Args:
        rows: with a column ``input_ids``, as :func:`tokenise` makes them.
        length: tokens of a row.
        filler: token that fills up the last row.
        overlap: tokens that a row repeats from the one before. With 1, every token but the very first is predicted
            exactly once, whether the model shifts its labels or the module does.
        options: for ``Dataset.from_generator``, as ``cache_dir``.

    Returns:
        The same kind of rows with ``input_ids`` of ``length`` and ``lengths``; of a stream, an iterable, which
        :func:`mix` and :func:`deal` take; of streams by split, a dictionary of such.

    Raises:
        ValueError: ``overlap`` is negative, or not below ``length``, or there is no column ``input_ids``.
        TypeError: the rows are a list or the like.
    """
    if not 0 <= overlap < length:
        raise ValueError(f"`overlap={overlap}` must be at least 0 and below `length={length}`.")
    if isinstance(rows, Mapping):
        parts = {name: pack(part, length, filler=filler, overlap=overlap, **options) for name, part in rows.items()}
        return parts if is_stream_of_splits(rows) else needs_datasets().DatasetDict(parts)
    columns = getattr(rows, "column_names", None)
    if columns is not None and "input_ids" not in columns:
        raise ValueError(f"The rows have the columns {columns}, and `pack` needs `input_ids`; use `tokenise` first.")
    if not (hasattr(rows, "iter") or is_stream(rows)):
        raise TypeError(
            f"`pack` takes rows of `datasets` or a stream of them, and was given a {type(rows).__name__}; "
            "`datasets.Dataset.from_list([{'input_ids': ...}])` makes them of a list."
        )
    if is_stream(rows):
        return PackedStream(rows, length, filler, overlap)
    datasets = needs_datasets()
    column = datasets.Sequence(datasets.Value("int64"))
    features = datasets.Features({"input_ids": column, "lengths": column})
    split = datasets.NamedSplit(f"packed_{rows.split or 'rows'}")  # what the progress bar calls them
    arguments = {"rows": rows, "length": length, "filler": filler, "overlap": overlap}
    return datasets.Dataset.from_generator(
        _packed_rows, gen_kwargs=arguments, features=features, split=split, **options
    )


class PackedStream(OwnStream):
    """A stream of documents as a stream of packed rows; every pass begins anew.

    Args:
        rows: the stream.
        length: tokens of a row.
        filler: token that fills up the last row.
        overlap: tokens that a row repeats from the one before.
    """

    def __init__(self, rows: Any, length: int, filler: int, overlap: int) -> None:
        super().__init__(rows)
        self._rows = rows
        self._sizes = (length, filler, overlap)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return pack_documents((row["input_ids"] for row in self._rows), *self._sizes)


def pack_documents(
    documents: Iterable[Sequence[int]], length: int, filler: int, overlap: int
) -> Iterator[dict[str, list[int]]]:
    """The rows of plain lists of tokens; see :func:`pack`."""
    tokens: list[int] = []
    owners: list[int] = []
    for number, document in enumerate(documents):
        tokens.extend(document)
        owners.extend([number] * len(document))
        start = 0
        while len(tokens) - start > length - (overlap == 0):  # a row that only repeats is none
            yield _row(tokens[start : start + length], owners[start : start + length])
            start += length - overlap
        tokens, owners = tokens[start:], owners[start:]
    while tokens:
        yield _row(tokens[:length], owners[:length], length, filler)
        tokens, owners = tokens[length - overlap :], owners[length - overlap :]
        if len(tokens) <= overlap:
            return


def _row(tokens: list[int], owners: list[int], length: int = 0, filler: int = 0) -> dict[str, list[int]]:
    lengths = [sum(1 for _ in same) for _, same in groupby(owners)]
    return {"input_ids": tokens + [filler] * (length - len(tokens)), "lengths": lengths}


def _packed_rows(rows: Any, length: int, filler: int, overlap: int) -> Iterator[dict[str, list[int]]]:
    documents = (tokens for batch in rows.iter(batch_size=100) for tokens in batch["input_ids"])
    return pack_documents(documents, length, filler, overlap)


class CollatePacked:
    """``collate_fn`` for packed rows: ``input_ids``, ``position_ids`` and ``labels``, all [batch, length].

    Positions begin again at every document, from which Hugging Face's models tell documents apart by themselves; the
    first token of a document is no target, and neither is filler.

    Args:
        documents: whether documents are kept apart; without, positions run through and only filler is left out.
        mask: whether to add ``attention_mask`` [batch, 1, length, length] of booleans: true where a token may look, at
            itself and before it in its own document. As ``attn_mask`` of ``scaled_dot_product_attention``.
    """

    def __init__(self, *, documents: bool = True, mask: bool = False) -> None:
        self._documents = documents
        self._mask = mask

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        tokens = torch.stack([torch.as_tensor(row["input_ids"]) for row in rows])
        owners, filled = self._owners([torch.as_tensor(row["lengths"]) for row in rows], tokens.shape[1])
        begins = torch.ones_like(tokens, dtype=torch.bool)
        begins[:, 1:] = owners[:, 1:] != owners[:, :-1]
        steps = torch.arange(tokens.shape[1]).expand_as(tokens)
        starts = torch.where(begins, steps, 0).cummax(1).values
        inner = begins & (steps > 0)
        batch = {
            "input_ids": tokens,
            "position_ids": steps - starts,
            "labels": tokens.masked_fill(filled | inner, IGNORED),
        }
        if self._mask:
            batch["attention_mask"] = ((owners[:, :, None] == owners[:, None, :]) & _causal(tokens.shape[1]))[:, None]
        return batch

    def _owners(self, lengths: list[Tensor], length: int) -> tuple[Tensor, Tensor]:
        """Number of the document of each token; filler counts as one more."""
        if not self._documents:
            lengths = [of_row.sum(0, keepdim=True) for of_row in lengths]
        owners = torch.full((len(lengths), length), -1)
        for row, of_row in zip(owners, lengths, strict=True):
            row[: int(of_row.sum())] = torch.arange(len(of_row)).repeat_interleave(of_row)
        return owners, owners < 0


def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()
