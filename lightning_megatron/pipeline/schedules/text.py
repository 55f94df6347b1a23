"""Schedules as text: one row per stage, one entry per instruction.

A refused schedule has no times, so it is drawn in list order; ``!`` marks the fault.
"""

from __future__ import annotations

from lightning_megatron.pipeline.schedules.instructions import Instruction, Schedule

IDLE = ".."
CONTINUED = "--"
_WINDOW = 8  # entries shown on either side of a fault
_ROWS = 16  # stages shown with a fault


def label(schedule: Schedule, step: Instruction) -> str:
    """Name of an instruction in a drawing; without the chunk if stages have only one."""
    if schedule.chunks > 1 or step.peer is not None:
        return str(step)
    return f"{step.kind.value}{step.micro_batch}"


def list_grid(schedule: Schedule, marks: tuple[tuple[int, int], ...] = ()) -> str:
    """Draw the lists without times, marking instructions with ``!``.

    Long lists are cut to the neighbourhood of the marks; ``...`` shows the cut.

    Args:
        schedule: Any schedule, also a malformed one.
        marks: ``(rank, position)`` to mark; a position past the end of a list marks a missing instruction.

    Returns:
        One line per stage.
    """
    marked = dict(reversed(marks))
    some = next(iter(marked.values()), 0)
    lines = []
    for rank in _ranks_around(len(schedule.instructions), sorted(marked)):
        steps, mark = schedule.instructions[rank], marked.get(rank)
        middle = some if mark is None else mark
        first, last = max(0, middle - _WINDOW), min(len(steps), middle + _WINDOW + 1)
        cells = ["..."] if first else []
        for at in range(first, last):
            text = label(schedule, steps[at]) if isinstance(steps[at], Instruction) else repr(steps[at])
            cells.append("!" + text if at == mark else text)
        cells += ["..."] if last < len(steps) else []
        cells += ["!missing"] if mark is not None and mark >= len(steps) else []
        lines.append((rank, cells))
    return table([cells for _, cells in lines], [rank for rank, _ in lines])


def table(rows: list[list[str]], ranks: list[int] | None = None) -> str:
    """Rows of cells in columns of equal width, each after the number of its stage."""
    ranks = list(range(len(rows))) if ranks is None else ranks
    width = max((len(cell) for cells in rows for cell in cells), default=0)
    digits = len(str(max(ranks, default=0)))
    lines = []
    for rank, cells in zip(ranks, rows, strict=True):
        # Fill idle and continued cells over their whole width, so that columns stay readable.
        filled = [cell[0] * width if cell in (IDLE, CONTINUED) else cell.ljust(width) for cell in cells]
        lines.append(f"stage {rank:>{digits}}  {' '.join(filled)}".rstrip())
    return "\n".join(lines)


def _ranks_around(stages: int, marked: list[int]) -> list[int]:
    """At most ``_ROWS`` ranks: those with a mark, then their nearest neighbours."""
    if stages <= _ROWS:
        return list(range(stages))
    wanted = marked[:_ROWS] or [0]
    distance = 1
    while len(wanted) < _ROWS:
        near = {rank + step for rank in marked or [0] for step in (-distance, distance)}
        wanted += [rank for rank in sorted(near) if 0 <= rank < stages and rank not in wanted]
        distance += 1
    return sorted(wanted[:_ROWS])


def counted(number: int, thing: str) -> str:
    """``1 GPU``, ``2 GPUs``, ``1 micro-batch``, ``8 micro-batches``."""
    ending = "" if number == 1 else "es" if thing.endswith("ch") else "s"
    return f"{number:,} {thing}{ending}"
