"""Says, in words, where two runs differ."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import torch

from tests.harness import run_trainers
from tests.harness.remember import remembered
from tests.parity.row import Row
from tests.parity.train import Trace, train
from tests.parity.zoo.registry import REFUSED_CUT, REFUSED_SPLIT, REFUSED_TOKENS, ZOO

FLOAT32_OF_OTHERS = 1e-6  # of weights, where attention scores or routers of Hugging Face's are float32 inside


@remembered
def reference(row: Row) -> Trace:
    """The one-process run, made once."""
    trace: Trace = run_trainers(train, row, devices=1)[0].value
    assert all(math.isfinite(loss) for loss in trace.losses), f"{row}: one process gives {trace.losses}"
    return trace


def run(row: Row) -> list[Trace]:
    """The row's run, one trace per rank."""
    outcomes = run_trainers(train, row, devices=row.devices, grace=20.0)
    return [outcome.value for outcome in outcomes]


def refusal(row: Row) -> str | None:
    """A pattern of what every rank says instead of training, or None for a row that trains."""
    stages, _, tensor = row.sizes
    if tensor > 1 and row.module in REFUSED_SPLIT:
        return REFUSED_SPLIT[row.module]
    if row.context > 1 and row.module in REFUSED_TOKENS:
        return REFUSED_TOKENS[row.module]
    return REFUSED_CUT.get(row.module) if stages > 1 else None


def check(row: Row) -> None:
    """Runs ``row`` and its reference, or sees that it is refused where it must be.

    Raises:
        AssertionError: listing every difference beyond the module's tolerance; or a rank that trained, hung or gave
            another reason where the row must be refused.
        JobFailed: a rank failed where the row must train.
    """
    reason = refusal(row)
    if reason is not None:
        _check_refused(row, reason)
        return
    traces, wanted = run(row), reference(row.reference)
    tensor = row.sizes[-1]
    for trace in traces:  # a whole state has buffers too, which are not of this comparison
        trace.weights = {name: value for name, value in trace.weights.items() if name in wanted.weights}
    losses, weights = tolerances(row.module, tensor, row.context)
    differences = list(compare(traces, wanted, losses, weights))
    assert not differences, f"{row}: {len(differences)} differences\n" + "\n".join(differences[:12])


def tolerances(name: str, tensor: int, context: int) -> tuple[float, float]:
    """What the losses, and the weights, of a module of the zoo may differ by over so many tensor and context ranks.

    Over these ranks a float32 loss is summed in another order, and its gradients with it.
    """
    module = ZOO[name]
    weights = max(module.weight_tolerance, module.tolerance) if tensor * context > 1 else module.weight_tolerance
    if context > 1 and name.startswith("hf_"):  # products over fewer tokens turn what is rounded to float32
        weights = max(weights, FLOAT32_OF_OTHERS)
    return module.tolerance, weights


def _check_refused(row: Row, reason: str) -> None:
    for outcome in run_trainers(train, row, devices=row.devices, check=False, grace=20.0):
        assert outcome.error is not None, f"{row}: rank {outcome.rank} was not refused"
        assert "killed while running" not in outcome.error, f"{row}: rank {outcome.rank} hung\n{outcome.stacks}"
        said = f"{outcome.error}{outcome.output}"
        assert re.search(reason, said), f"{row}: rank {outcome.rank} does not say {reason!r} but\n{said}"


def compare(
    traces: Sequence[Trace],
    wanted: Trace,
    tolerance: float,
    weight_tolerance: float | None = None,
) -> Iterator[str]:
    """Yields one sentence per difference.

    Args:
        traces: one per rank.
        wanted: the reference.
        tolerance: absolute and relative.
        weight_tolerance: for weights; by default ``tolerance``.
    """
    for rank, trace in enumerate(traces):
        if trace.steps != wanted.steps:
            yield f"rank {rank} took {trace.steps} steps, one process took {wanted.steps}"
        yield from _numbers(f"rank {rank} loss", trace.losses, wanted.losses, tolerance)
        yield from _numbers(f"rank {rank} learning rate", trace.rates, wanted.rates, 1e-12)
        yield from _metrics(rank, trace, wanted, tolerance)
        if trace.best_name != wanted.best_name or not _close(trace.best_score, wanted.best_score, tolerance):
            yield (
                f"rank {rank} chose {trace.best_name!r} ({trace.best_score}), "
                f"one process chose {wanted.best_name!r} ({wanted.best_score})"
            )
    yield from _weights(traces, wanted, tolerance if weight_tolerance is None else weight_tolerance)


def _metrics(rank: int, trace: Trace, wanted: Trace, tolerance: float) -> Iterator[str]:
    if len(trace.metrics) != len(wanted.metrics):
        yield f"rank {rank} recorded metrics {len(trace.metrics)} times, one process {len(wanted.metrics)} times"
    for time, (got, expected) in enumerate(zip(trace.metrics, wanted.metrics, strict=False)):
        if set(got) != set(expected):
            yield f"rank {rank} record {time} has metrics {sorted(got)}, one process {sorted(expected)}"
        for name in sorted(set(got) & set(expected)):
            if not _close(got[name], expected[name], tolerance):
                yield f"rank {rank} record {time} {name} = {got[name]!r}, one process {expected[name]!r}"


def _numbers(what: str, got: Sequence[float], expected: Sequence[float], tolerance: float) -> Iterator[str]:
    if len(got) != len(expected):
        yield f"{what}: {len(got)} values, one process {len(expected)}"
    for index, (one, other) in enumerate(zip(got, expected, strict=False)):
        if not _close(one, other, tolerance):
            yield f"{what} {index} = {one!r}, one process {other!r}"


def _weights(traces: Sequence[Trace], wanted: Trace, tolerance: float) -> Iterator[str]:
    found = {name for trace in traces for name in trace.weights}
    if missing := sorted(set(wanted.weights) - found):
        yield f"on no rank: {missing}"
    if strange := sorted(found - set(wanted.weights)):
        yield f"unknown to one process: {strange}"
    for rank, trace in enumerate(traces):
        for name in sorted(set(trace.weights) & set(wanted.weights)):
            got, expected = trace.weights[name], wanted.weights[name]
            if got.shape != expected.shape:
                yield f"rank {rank} {name} has shape {tuple(got.shape)}, one process {tuple(expected.shape)}"
            elif not torch.allclose(got, expected, rtol=tolerance, atol=tolerance):
                yield f"rank {rank} {name} differs by {(got - expected).abs().max().item():.3g}"


def _close(one: float, other: float, tolerance: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return abs(one - other) <= tolerance * (1 + abs(other))
