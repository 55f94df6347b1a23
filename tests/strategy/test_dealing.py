"""Steps read the same samples at any number of replicas, also where a run goes on at another one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from lightning_megatron import data
from tests.harness import run_trainers
from tests.strategy.dealing_scenarios import BATCH, STEPS, STOP, read

PLAIN = SimpleNamespace(distributed_sampler_kwargs=None)


def _read(kind: str, replicas: int, load: str | None = None, save: str | None = None) -> list[list[int]]:
    return run_trainers(read, kind, replicas, load, save, devices=replicas)[0].value


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    "kind",
    ["rows", "packed streams", *(pytest.param(f"stream{how}", marks=pytest.mark.wide) for how in ("", " in a worker"))],
)
def test_every_step_reads_the_same_samples_at_one_two_and_four_replicas_and_after_a_resume(
    kind: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "middle.ckpt")
    whole = _read(kind, 2, save=path)
    assert len(whole) == STEPS and all(len(samples) == BATCH for samples in whole)
    first = [sample for samples in whole[:3] for sample in samples]
    assert first != sorted(first)
    assert _read(kind, 1) == whole
    assert _read(kind, 4) == whole
    for replicas in (1, 4):
        assert _read(kind, replicas, load=path) == whole[STOP:]


def test_passes_differ_in_their_order_and_not_in_their_samples() -> None:
    stream = Dataset.from_dict({"n": list(range(12))}).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=6)
    loader = data.deal(stream, 4, PLAIN, passes=2)
    numbers = [int(number) for batch in loader for number in batch["n"]]
    assert sorted(numbers[:12]) == sorted(numbers[12:]) == list(range(12))
    assert numbers[:12] != numbers[12:]


def test_an_empty_stream_ends_an_endless_loader() -> None:
    assert list(data.deal(iter(()), 4, PLAIN, passes=None)) == []


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([1, 2], {"batch": 3}, r"`deal\(batch=3\)` cannot be shared by 2 replicas; use a multiple of 2"),
        ([1, 2], {}, "2 rows make no batch of 4 samples"),
        ([1] * 9, {"drop_last": False}, "cannot share out 9 rows over 2 replicas"),
        (iter(()), {"drop_last": False}, "cannot share out a stream over 2 replicas"),
        ([1] * 4, {"passes": None}, "`passes=None` is for streams"),
        (iter(()), {"shuffle": True}, "a stream is shuffled before, by `rows.shuffle"),
        (iter(()), {"num_workers": 2}, "`num_workers=2` would split a stream between workers; use 1"),
    ],
)
def test_what_would_change_the_order_is_refused(rows: Any, options: dict[str, Any], message: str) -> None:
    trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 0})
    with pytest.raises(ValueError, match=message):
        data.deal(rows, **({"batch": 4} | options), trainer=trainer)


def test_rows_that_are_shared_out_evenly_may_keep_a_last_batch_that_is_short() -> None:
    def read(replicas: int, replica: int) -> list[list[int]]:
        trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": replicas, "rank": replica})
        return [batch.tolist() for batch in data.deal(list(range(10)), 4, trainer, drop_last=False)]

    assert read(1, 0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert read(2, 0) == [[0, 2], [4, 6], [8]] and read(2, 1) == [[1, 3], [5, 7], [9]]
