"""Reading where another thread is, from outside."""

from __future__ import annotations

import sys
import threading
import traceback

import pytest

from lightning_megatron.mesh.watch.hang import HangWatch
from lightning_megatron.mesh.watch.other_threads import StackLine, listing, places_of, read_places


class _Store:
    def add(self, key: str, amount: int) -> int:
        return 0


def test_the_watch_makes_no_frame_objects_of_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one may collect garbage, whose finalizers let the main thread leave the frame: a segmentation fault."""
    monkeypatch.delattr(sys, "_current_frames")
    monkeypatch.setattr(traceback, "extract_stack", None)
    assert HangWatch(_Store(), 0, 1, 1e9).look() is None


def test_the_places_of_another_thread_are_read_innermost_first() -> None:
    known, done = threading.Event(), threading.Event()

    def wait_for_it() -> None:
        known.set()
        done.wait()

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    known.wait()
    stack = places_of(thread.ident or 0)
    done.set()
    thread.join()
    assert stack is not None
    names = [place.name for place in stack]
    assert names.index("wait") < names.index("wait_for_it") < names.index("run")
    assert stack[names.index("wait_for_it")].text() == "done.wait()"
    assert listing(stack).splitlines()[-2].endswith("in wait")
    assert places_of(1) is None


def test_threads_and_letters_that_are_not_ascii_are_told_apart() -> None:
    written = (
        "Current thread 0x00000000000000ab [watch] (most recent call first):\n"
        '  File "/a.py", line 3 in look\n\n'
        "Thread 0x00000000000000cd (most recent call first):\n"
        '  File "/caf\\xe9.py", line ??? in \\u00e92\n'
        '  File "/b.py", line 7 in <lambda>\n'
    )
    assert read_places(written, 0xCD, 40) == [StackLine("/café.py", 0, "é2"), StackLine("/b.py", 7, "<lambda>")]
    assert read_places(written, 0xAB, 40) == [StackLine("/a.py", 3, "look")]
