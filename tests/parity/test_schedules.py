"""Every schedule, with several pieces per stage, split backwards and recomputation, trains as one process does."""

from __future__ import annotations

import pytest

from tests.parity.covering import covering_rows
from tests.parity.schedule_rows import LAYERS, ScheduleRow, check_row

NAMED = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
SHARED = ("zb-h2", "dualpipe-v")
"""Under which a table shared by both ends of the model is met in an ordinary run."""

# Every schedule with as many micro-batches as stages divide (4) and not (3, of unequal size; and 8), every module.
ROWS = [
    *(ScheduleRow(name, micro_batch=3, module="shared", clip="value") for name in SHARED),
    ScheduleRow("zb-v", replicas=2, micro_batch=1, accumulate=2, layers=4),
    ScheduleRow("interleaved", virtual=3, micro_batch=3),
    ScheduleRow("interleaved", virtual=2, replicas=2, micro_batch=1, module="shared", accumulate=2),
    ScheduleRow("interleaved", stages=3, virtual=2, micro_batch=2, module="torch"),
    ScheduleRow("interleaved", virtual=2, micro_batch=1, others="{'pipeline_schedule_options': {'group_size': 3}}"),
    ScheduleRow("zb-h2", stages=3, micro_batch=1, others="{'pipeline_schedule_options': {'memory_limit': 4}}"),
    ScheduleRow("zb-v", stages=4, micro_batch=3),
    ScheduleRow("zb-v", micro_batch=2, module="linears", others="{'evaluation_micro_batch_size': 4}"),
    ScheduleRow("one_by_one", micro_batch=2, module="shared"),
    ScheduleRow("gpipe", micro_batch=3, recompute="'full'"),
    ScheduleRow("1f1b", micro_batch=2, module="torch", recompute="['*.layers.[03]', '*.linear1']"),
    ScheduleRow("zb-v", micro_batch=2, module="shared", recompute="'full'"),
    *(
        ScheduleRow(name, micro_batch=2, module="dropout", recompute=kind)
        for name, kind in (("zb-v", "'full'"), ("interleaved", "'selective'"), ("dualpipe-v", "{'every': 3}"))
    ),
    ScheduleRow("zb-v", tensor=2, micro_batch=2, recompute="'full'", layers=4),
    ScheduleRow("interleaved", tensor=2, micro_batch=3, recompute="['*.mlp']", layers=4),
    ScheduleRow("1f1b", stages=1, micro_batch=2, module="dropout", recompute="['*.mlp', '*.qkv']"),
]


@pytest.mark.everyday(2)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_training_by_schedule_is_that_of_one_process(row: ScheduleRow) -> None:
    check_row(row)


def wide_rows() -> list[ScheduleRow]:
    """Any three of: schedule and pieces, micro-batches, clipping, accumulation, recomputation, further ranks.

    Batches of 8 and 4 samples make 8 and 4, 4 and 2 or 3 and 2 micro-batches, with 2 replicas half as many; every run
    validates too.
    """
    schedules = [(name, None) for name in NAMED] + [("interleaved", v) for v in (1, 2, 3)]
    beside = ((1, 1), (2, 1), (1, 2))  # with both, eight ranks: below, under each schedule
    columns = (schedules, (1, 2, 3), ("none", "norm", "value"), (1, 2), ("None", "'full'", "['*.mlp']"), beside)
    return [
        *(
            ScheduleRow(
                name,
                virtual=v,
                micro_batch=m,
                clip=clip,
                accumulate=acc,
                recompute=kind,
                replicas=dp,
                tensor=tp,
                layers=LAYERS if dp * tp == 1 else 2 * max(2, v or 1),
            )
            for (name, v), m, clip, acc, kind, (dp, tp) in covering_rows(columns, 3)
        ),
        *(ScheduleRow(name, micro_batch=3, module="shared", clip="value") for name in NAMED if name not in SHARED),
        *(ScheduleRow(name, replicas=2, micro_batch=1, accumulate=2, layers=4) for name in ("zb-h1", "dualpipe-v")),
        *(ScheduleRow("interleaved", virtual=v, micro_batch=m) for v, m in ((1, 2), (2, 1), (2, 3), (4, 2))),
        ScheduleRow("dualpipe-v", stages=3, micro_batch=1, module="torch", clip="none"),
        ScheduleRow("zb-h1", micro_batch=2, recompute="{'every': 2}"),
        ScheduleRow("1f1b", micro_batch=2, module="dropout", recompute="'full'"),
        ScheduleRow("zb-h1", tensor=2, micro_batch=2, module="torch", layers=4),
        ScheduleRow("one_by_one", replicas=2, micro_batch=1, module="linears"),
        *(
            ScheduleRow(name, tensor=2, replicas=2, micro_batch=1, accumulate=1 + turn % 2, layers=4)
            for turn, name in enumerate(("1f1b", "interleaved", "zb-h2", "zb-v", "dualpipe-v"))
        ),
    ]


@pytest.mark.wide
@pytest.mark.parametrize("row", wide_rows(), ids=str)
def test_training_by_schedule_is_that_of_one_process_in_every_row(row: ScheduleRow) -> None:
    check_row(row)
