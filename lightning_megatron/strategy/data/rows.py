"""Rows of Hugging Face's ``datasets``, tokenised and mixed: thin doors to its own functions, which cache and stream.

Everything here takes a ``Dataset``, a ``DatasetDict`` or an ``IterableDataset``, which is what
``load_dataset(..., streaming=True)`` gives. The package is imported on first use.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_END = object()


def needs_datasets() -> Any:
    """The package ``datasets``.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "`lightning_megatron.data` works on Hugging Face's `datasets`, which is not installed: "
            "`pip install 'lightning_megatron[data]'`."
        ) from error
    return datasets


def tokenise(
    rows: Any,
    tokenizer: Any,
    *,
    column: str = "text",
    end: int | None = None,
    longest: int | None = None,
    **options: Any,
) -> Any:
    """Turn texts into token numbers: the only column of the result is ``input_ids``.

    What is on disk is cached by ``datasets`` and shows a progress bar; a stream is tokenised while it is read.

    Args:
        rows: what has the texts.
        tokenizer: of ``transformers`` or of ``tokenizers``.
        column: with the texts.
        end: number of a token to put after every document, by which :func:`pack` and the model tell them apart.
        longest: tokens of a document to keep, ``end`` included; all by default.
        options: for ``map``, as ``num_proc`` or ``cache_file_name``.

    Returns:
        The same kind of rows.

    Raises:
        ValueError: there is no such column, or ``longest`` is below 1.
        TypeError: the rows are not from ``datasets``.
    """
    if not hasattr(rows, "column_names"):
        raise TypeError(
            f"`tokenise` takes rows of `datasets`, and was given a {type(rows).__name__}; "
            "`datasets.Dataset.from_list([{'text': ...}])` makes them of a list."
        )
    if longest is not None and longest < 1:
        raise ValueError(f"`longest={longest}` must be at least 1 token.")
    columns = _columns(rows)
    if columns is not None and column not in columns:
        raise ValueError(f"The rows have the columns {columns}; `tokenise(column={column!r})` names none of them.")
    arguments = {"tokenizer": tokenizer, "column": column, "end": end, "longest": longest}
    if not (is_stream(rows) or is_stream_of_splits(rows)):
        options.setdefault("desc", "Tokenising")
    found = rows.map(_tokenise, batched=True, fn_kwargs=arguments, remove_columns=columns, **options)
    return found.select_columns(["input_ids"]) if columns is None else found


def _tokenise(batch: Any, tokenizer: Any, column: str, end: int | None, longest: int | None) -> dict[str, Any]:
    if hasattr(tokenizer, "encode_batch"):
        found = [encoding.ids for encoding in tokenizer.encode_batch(batch[column])]
    else:
        found = tokenizer(batch[column])["input_ids"]
    ending = [] if end is None else [end]
    keep = None if longest is None else longest - len(ending)
    return {"input_ids": [[*tokens[:keep], *ending] for tokens in found]}


def mix(sources: Sequence[Any], weights: Sequence[float], *, seed: int = 0, until: str = "first") -> Any:
    """Draw rows from several sources, by weights, in an order that depends on ``seed`` alone.

    The order is the same at any number of replicas and after a resume. Rows of one source keep their order. Weights
    count rows: mix packed rows, which are equally long, where they should count tokens.

    Args:
        sources: all of one kind, with the same columns; or streams that :func:`pack` has made.
        weights: of the sources; only their ratios count.
        seed: of the draws.
        until: ``"first"`` stops as soon as a source has no rows left, so no row comes twice; ``"all"`` goes on until
            every source was read through, and begins shorter ones again.

    Raises:
        ValueError: no sources, another number of weights, one that is not positive, an unknown ``until``, or sources
            with other columns than the first.
    """
    stops = {"first": "first_exhausted", "all": "all_exhausted"}
    if until not in stops:
        raise ValueError(f"`until={until!r}` must be 'first' or 'all'.")
    if not sources or len(sources) != len(weights):
        raise ValueError(f"{len(sources)} sources have {len(weights)} weights; give one to each, in `weights=[...]`.")
    if not all(weight > 0 for weight in weights):
        raise ValueError(f"`weights={list(weights)}` must all be above 0; leave out sources that are not wanted.")
    shares = [weight / sum(weights) for weight in weights]
    if all(isinstance(source, OwnStream) for source in sources):
        return MixedStream(sources, shares, seed, until)
    named = [sorted(_columns(source) or ()) for source in sources if hasattr(source, "column_names")]
    for columns in named:
        if columns and named[0] and columns != named[0]:
            raise ValueError(
                f"`mix` has sources with the columns {named[0]} and {columns}, and rows would lack some; "
                "`select_columns` and `rename_columns` of `datasets` make them alike."
            )
    return needs_datasets().interleave_datasets(
        list(sources), probabilities=shares, seed=seed, stopping_strategy=stops[until]
    )


class OwnStream:
    """A stream that is not from ``datasets``; every pass over it begins anew."""

    def __init__(self, *sources: Any) -> None:
        self._sources = sources

    def set_epoch(self, epoch: int) -> None:
        """Let shuffled sources draw another order; what is not shuffled has one."""
        for source in self._sources:
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)


class MixedStream(OwnStream):
    """Rows of several streams, drawn by weights; see :func:`mix`. Every pass draws the same sources."""

    def __init__(self, sources: Sequence[Any], shares: Sequence[float], seed: int, until: str) -> None:
        super().__init__(*sources)
        self._shares = list(shares)
        self._seed = seed
        self._until = until

    def __iter__(self) -> Iterator[Any]:
        draws = random.Random(self._seed)
        reading = [iter(source) for source in self._sources]
        ended: set[int] = set()
        while True:
            (number,) = draws.choices(range(len(reading)), self._shares)
            row = next(reading[number], _END)
            if row is _END:
                ended.add(number)
                if self._until == "first" or len(ended) == len(reading):
                    return
                reading[number] = iter(self._sources[number])
                row = next(reading[number], _END)
                if row is _END:
                    raise ValueError(f"Source {number} of `mix(until='all')` has no rows; leave it out.")
            yield row


def is_stream_of_splits(rows: Any) -> bool:
    """Whether rows are streams by split, as ``load_dataset(..., streaming=True)`` gives them."""
    return isinstance(rows, Mapping) and any(is_stream(part) for part in rows.values())


def is_stream(rows: Any) -> bool:
    """Whether rows are read one after the other, without a length."""
    return not hasattr(rows, "__len__")


def _columns(rows: Any) -> list[str] | None:
    found = rows.column_names
    if isinstance(found, dict):
        found = next(iter(found.values()))
    return None if found is None else list(found)
