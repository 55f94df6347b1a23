"""Reading where another thread is, from outside."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lightning_megatron.mesh.watch import other_threads
from lightning_megatron.mesh.watch.other_threads import listing, places_of

BESIDE_NEW_THREADS = """
import ctypes, gc, importlib.util, sys, threading, time

spec = importlib.util.spec_from_file_location("other_threads", sys.argv[1])
other_threads = sys.modules["other_threads"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other_threads)
libc, callback = ctypes.CDLL(None), ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
nothing = callback(lambda argument: None)
end, main, looks = time.monotonic() + float(sys.argv[2]), threading.main_thread().ident, 0


def start_foreign_threads():  # as torch does: each gets a state of the interpreter when it first calls Python
    thread = ctypes.c_ulong()
    while time.monotonic() < end:
        libc.pthread_create(ctypes.byref(thread), None, nothing, None)
        libc.pthread_join(thread, None)


def watch():
    global looks
    while time.monotonic() < end:
        assert other_threads.places_of(main)
        looks += 1


class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0)


def recurse(depth):
    Cycle()
    return recurse(depth - 1) if depth else [Cycle() for _ in range(3)]


gc.set_threshold(20, 3, 3)
for target in (start_foreign_threads, start_foreign_threads, watch):
    threading.Thread(target=target, daemon=True).start()
while time.monotonic() < end:
    recurse(25)
print(looks)
"""


def test_looking_does_not_end_a_process_that_starts_threads_and_collects_garbage() -> None:
    options = [BESIDE_NEW_THREADS, str(Path(other_threads.__file__)), "3"]
    ended = subprocess.run([sys.executable, "-c", *options], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and int(ended.stdout) > 100, ended.stderr


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_as_before(collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        assert places_of(threading.get_ident())
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


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
