"""A rank that stops taking part is named by those that wait for it.

A hung rank raises nothing, and the others only learn that a collective took too long. So a thread on every rank looks
at its main thread now and then. Where that has not moved for a while and waits for others, the thread asks all ranks
what they are at, through the store that they met at, and reports the rank that waits for nobody::

    rank 0   waits in a receive, 60 s ─ ask ─ rank 1 is in `tokenize`, data.py:31 ─ report ─ all end
    rank 1   computes, sleeps, or does not answer at all

What a rank waits for is what its blocking calls have said (``mesh.watch.waits``). A call of ``torch.distributed`` that
a user's code makes says nothing; it is known by its place on the stack, and named with the line that called it. The
flight recorder of torch adds the number of the collective where it is on (``TORCH_FR_BUFFER_SIZE=2000``); it sees
collectives, not the sends and receives of gloo.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from lightning_megatron.mesh.watch import waits
from lightning_megatron.mesh.watch.other_threads import StackLine, listing, places_of

_ANSWERS_S = 3.0
_DEPTH = 6
_TORCH = os.path.join("torch", "distributed", "")


class HangWatch:
    """Samples the state of one rank's main thread; called periodically from a separate thread.

    Args:
        store: reachable from all ranks.
        rank: this rank.
        world_size: number of ranks.
        patience_s: seconds without a move until the others are asked.
    """

    def __init__(self, store: Any, rank: int, world_size: int, patience_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._patience_s = patience_s
        self._main = threading.main_thread().ident or 0
        self._beats = 0
        self._place: Any = None
        self._since = time.monotonic()
        self._answered = 0

    def beat(self) -> None:
        """A batch begins: wherever the main thread is found from now on, it has moved."""
        self._beats += 1

    def look(self) -> tuple[int, str] | None:
        """The rank that the others wait for, and what is known about it, once this rank has waited too long.

        Raises:
            RuntimeError: the store is gone.
        """
        stack = places_of(self._main)
        place = self._beats, stack
        if place != self._place or stack is None:
            self._place, self._since = place, time.monotonic()
        stack = stack or []
        self._answer(stack)
        if time.monotonic() - self._since < self._patience_s or _waiting_now(stack) is None:
            return None
        return self._ask(stack)

    def _answer(self, stack: Sequence[StackLine]) -> None:
        """Answer every question that any rank has asked."""
        asked = self._store.add("hang/asked", 0)
        if asked == self._answered:
            return
        waiting = _waiting_now(stack)
        note = {
            "waits": waiting is not None,
            "for": waiting.what if waiting is not None else "",
            "ranks": waiting.ranks if waiting is not None else (),
            "still_s": time.monotonic() - self._since,
            "stack": listing(stack[:_DEPTH]),
            "collective": _unfinished_collective(),
        }
        while self._answered < asked:
            self._answered += 1
            self._store.set(f"hang/{self._answered}/{self._rank}", json.dumps(note))

    def _ask(self, stack: Sequence[StackLine]) -> tuple[int, str] | None:
        question = self._store.add("hang/asked", 1)
        until = time.monotonic() + _ANSWERS_S
        while time.monotonic() < until:
            self._answer(stack)
            time.sleep(0.2)
        notes = [self._note(question, rank) for rank in range(self._world_size)]
        self._since = time.monotonic()  # ask again after as long a time, should nobody be to blame now
        missing = [rank for rank, note in enumerate(notes) if note is None or not note["waits"]]
        if missing:
            culprit = missing[0]
            return culprit, _report(culprit, notes, self._patience_s)
        if all(note is not None and note["still_s"] >= self._patience_s / 2 for note in notes):
            return self._rank, "all ranks wait for one another:\n" + _waiting(notes)
        return None

    def _note(self, question: int, rank: int) -> dict[str, Any] | None:
        key = f"hang/{question}/{rank}"
        return dict(json.loads(self._store.get(key))) if self._store.check([key]) else None


def _waiting_now(stack: Sequence[StackLine]) -> waits.Waiting | None:
    """The wait that this process is in; ``None`` if it does not.

    Args:
        stack: of the main thread, innermost first.
    """
    return waits.waiting(_call_of_torch(stack))


def _call_of_torch(stack: Sequence[StackLine]) -> str:
    """A call that blocks and says nothing itself: ```all_reduce` called at task.py:31``; empty if there is none."""
    name = ""
    for place in stack:
        if _TORCH not in place.file:
            name = name or ("`wait`" if ".wait(" in place.text() else "")
            return f"{name} called at {os.path.basename(place.file)}:{place.line}" if name else ""
        if not place.name.startswith("_") and place.name != "wrapper":
            name = f"`{place.name}`"
    return name


def _unfinished_collective() -> str:
    """The flight recorder's entry of the newest unfinished collective; empty if it records nothing."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return ""
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    waiting = [entry for entry in entries if not entry.get("retired")]
    if not waiting:
        return ""
    last = waiting[-1]
    number = last["p2p_seq_id"] if last["is_p2p"] else last["collective_seq_id"]
    return f"{last['profiling_name']} number {number} of group {' '.join(last['process_group'])}, {last['input_sizes']}"


def _report(culprit: int, notes: list[dict[str, Any] | None], patience_s: float) -> str:
    note = notes[culprit]
    if note is None:
        told = "It does not answer: its process is stopped, or its interpreter is held.\n"
    else:
        told = f"It waits for nobody and has been here for {note['still_s']:.0f} s:\n{note['stack']}"
    missed = "".join(f"It misses the {what}.\n" for what in _missed(culprit, notes))
    return (
        f"it has taken no part for more than {patience_s:.0f} s (`hang_timeout`). {missed}{told}The others wait:\n"
        f"{_waiting(notes)}"
    )


def _missed(culprit: int, notes: list[dict[str, Any] | None]) -> list[str]:
    """The operations that wait for ``culprit``; if there are none, all operations that any rank waits for."""
    waiting = [note for note in notes if note is not None and note["waits"] and note["for"]]
    direct = [note for note in waiting if culprit in note["ranks"]]
    return list(dict.fromkeys(note["for"] for note in direct or waiting))[:3]


def _waiting(notes: list[dict[str, Any] | None]) -> str:
    lines = []
    for rank, note in enumerate(notes):
        if note is not None and note["waits"]:
            last = note["stack"].strip().splitlines()[-2:]
            seen = "".join(f", {note[key]}" for key in ("for", "collective") if note[key])
            lines.append(f"  rank {rank}{seen}: {' '.join(part.strip() for part in last)}")
    return "\n".join(lines)
