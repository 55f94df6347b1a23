"""Sums of gradients start in one order, at once or where all replicas have said that they can."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_megatron.data_parallel.buckets.launches import Launches


@dataclass
class Two:
    """A bucket of two parameters."""

    name: str
    ready: set[int] = field(default_factory=set)
    adds: bool = False
    launched: bool = False
    parameters: tuple[int, int] = (0, 1)


def started(ready: list[int], most: int, **of_second: bool) -> tuple[str, int]:
    """What starts of three buckets of which so many gradients are there, and how many were complete before."""
    names: list[str] = []
    launches = Launches(lambda bucket: names.append(bucket.name))  # type: ignore[attr-defined]
    buckets = [Two(name, set(range(count))) for name, count in zip("abc", ready, strict=True)]
    for key, value in of_second.items():
        setattr(buckets[1], key, value)
    complete = launches.complete(buckets)  # type: ignore[arg-type]
    launches.start(buckets, most)  # type: ignore[arg-type]
    launches.start(buckets, most)  # type: ignore[arg-type]
    return "".join(names), complete


def test_sums_start_in_order_and_once() -> None:
    assert started([2, 2, 2], 3) == ("abc", 3)
    assert started([2, 1, 2], 3) == ("a", 1), "one without all of its gradients holds back those behind it"
    assert started([2, 2, 2], 1) == ("a", 3), "no more than all replicas have complete"


def test_buckets_that_add_up_or_have_started_are_passed() -> None:
    assert started([2, 0, 2], 3, adds=True) == ("ac", 3)
    assert started([2, 2, 2], 3, launched=True) == ("ac", 3)


def test_a_step_begins_anew() -> None:
    names: list[str] = []
    launches = Launches(lambda bucket: names.append(bucket.name))  # type: ignore[attr-defined]
    for _ in range(2):
        launches.begin()
        launches.start([Two("a", {0, 1}), Two("b")], 2)  # type: ignore[list-item]
    assert names == ["a", "a"]
