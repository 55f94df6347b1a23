"""Runs tests side by side: processes forked once everything is collected, which take bundles of tests from a queue.

Most tests of this project wait: for worker processes that talk to each other, for a deadline, for a launcher to start.
One test after the other leaves half of a small machine idle. Lanes are forks of pytest's own process, so nothing is
collected twice; each has worker processes of its own.

    pytest                   as many lanes as processors and one more
    pytest --lanes 1         one test after the other, in this process; so too with --pdb, -s or few tests

Tests marked ``alone`` measure time or memory and run at the end, one after the other.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

FEWEST = 24  # tests that are worth forking for
BUNDLE = 6  # tests that a lane takes at once
AT_END: list[Callable[[], None]] = []  # what a lane calls when it ends, since the rest of the session is the parent's


@dataclass
class Lane:
    """A forked process and what it is doing.

    Attributes:
        process: the fork.
        connection: carries numbers of tests there, and reports back.
        bundle: numbers of the tests it has; empty when it is idle.
        current: the test that it runs now.
        reports: of the bundle, shown together when it is done.
    """

    process: Any
    connection: Connection
    bundle: list[int] = field(default_factory=list)
    current: int = -1
    reports: dict[int, list[Any]] = field(default_factory=dict)


class SideBySide:
    """The plugin: replaces pytest's loop over tests.

    Args:
        lanes: how many processes run tests at the same time.
        before: called once before the lanes are forked, to make what they share; beside the collection of whole suites.
    """

    def __init__(self, lanes: int, before: Callable[[], None] | None = None) -> None:
        self.lanes, self.before = lanes, before
        self.context = multiprocessing.get_context("fork")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Begins what lanes share, which takes as long as the collection of all tests does, on another processor."""
        named = session.config.args_source is pytest.Config.ArgsSource.ARGS  # few tests, maybe none that needs it
        if not named and not self._in_this_process(session.config.option):
            self._prepare()

    def _prepare(self) -> None:
        if self.before is not None:
            self.before()
            self.before = None

    def _in_this_process(self, options: Any) -> bool:
        return bool(options.collectonly or options.usepdb or options.capture == "no" or self.lanes < 2)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Runs everything, or leaves it to pytest's own loop where there is little to gain."""
        options = session.config.option
        if options.collectonly or (session.testsfailed and not options.continue_on_collection_errors):
            return None
        gc.collect()
        gc.freeze()  # what is imported and collected by now stays
        if self._in_this_process(options) or len(session.items) < FEWEST:
            return None
        self._prepare()
        together, alone = bundles(session.items)
        for queue, lanes in ((together, self.lanes), (alone, 1)):
            _Queue(session, queue, lanes, self.context).run()
        return True


class _Queue:
    """One round of bundles over some lanes."""

    def __init__(self, session: pytest.Session, queue: deque[list[int]], lanes: int, context: Any) -> None:
        self.session, self.queue, self.context = session, queue, context
        self.lanes: list[Lane] = []
        for _ in range(min(lanes, len(queue))):
            self.lanes.append(self._fork())

    def run(self) -> None:
        """Hands out bundles until none is left.

        Raises:
            pytest.Session.Failed: on ``-x`` and ``--maxfail``.
        """
        try:
            for lane in self.lanes:
                self._hand_out(lane)
            while busy := [lane for lane in self.lanes if lane.bundle]:
                for connection in wait([lane.connection for lane in busy]):
                    self._hear(next(lane for lane in busy if lane.connection is connection))
        finally:
            for lane in self.lanes:
                _end(lane)

    def _fork(self) -> Lane:
        ours, theirs = self.context.Pipe()
        parents = [ours, *(lane.connection for lane in self.lanes)]
        process = self.context.Process(target=_serve, args=(self.session, theirs, parents), daemon=False)
        process.start()
        theirs.close()
        return Lane(process, ours)

    def _hand_out(self, lane: Lane) -> None:
        if self.queue:
            lane.bundle, lane.reports = self.queue.popleft(), {}
            lane.connection.send(lane.bundle)

    def _hear(self, lane: Lane) -> None:
        try:
            kind, content = lane.connection.recv()
        except (EOFError, ConnectionResetError):
            self._replace(lane)
            return
        if kind == "start":
            lane.current = content
            lane.reports[content] = []
        elif kind == "report":
            hook = self.session.config.hook
            lane.reports[lane.current].append(
                hook.pytest_report_from_serializable(config=self.session.config, data=content)
            )
        else:
            self._show(lane)
            self._hand_out(lane)

    def _show(self, lane: Lane) -> None:
        """Gives pytest the reports of a finished bundle, as if the tests had just run."""
        lane.bundle = []
        for number, reports in lane.reports.items():
            item = self.session.items[number]
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            for report in reports:
                item.ihook.pytest_runtest_logreport(report=report)
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self.session.shouldfail:
            raise self.session.Failed(self.session.shouldfail)
        if self.session.shouldstop:
            raise self.session.Interrupted(self.session.shouldstop)

    def _replace(self, lane: Lane) -> None:
        """Fails the test that ended its process, and gives the rest of its bundle to a new one."""
        lane.process.join()
        item = self.session.items[lane.current]
        why = f"the process that ran it ended with exit code {lane.process.exitcode}"
        lane.reports[lane.current] = [pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")]
        if rest := lane.bundle[lane.bundle.index(lane.current) + 1 :]:
            self.queue.appendleft(rest)
        self.lanes.remove(lane)
        self._show(lane)
        self.lanes.append(self._fork())
        self._hand_out(self.lanes[-1])


def bundles(items: list[pytest.Item]) -> tuple[deque[list[int]], deque[list[int]]]:
    """Numbers of tests in the order in which lanes take them: those that run side by side, and those that run alone.

    Tests through a launcher wait most and come first, beside tests that compute. A bundle is of one file; a file with a
    fixture of its own is one bundle.
    """
    together: list[list[int]] = []
    alone: list[list[int]] = []
    for _, numbers in itertools.groupby(range(len(items)), key=lambda number: items[number].path):
        file = list(numbers)
        alone += [[number] for number in file if items[number].get_closest_marker("alone")]
        rest = [number for number in file if not items[number].get_closest_marker("alone")]
        size = len(file) if any(map(_shares_a_fixture, (items[number] for number in rest))) else BUNDLE
        together += [rest[start : start + size] for start in range(0, len(rest), size)]
    together.sort(key=lambda bundle: items[bundle[0]].get_closest_marker("launch") is None)
    return deque(together), deque(alone)


def _shares_a_fixture(item: pytest.Item) -> bool:
    known = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    return any(fixture.scope == "module" for found in known.values() for fixture in found)


def _end(lane: Lane) -> None:
    if lane.bundle:
        lane.process.terminate()
    else:
        lane.connection.send([])
    lane.process.join()


def _serve(session: pytest.Session, connection: Connection, parents: list[Connection]) -> None:
    """The life of a lane: what pytest prints and counts happens in the parent.

    Args:
        session: of the parent.
        connection: to it.
        parents: its own ends of connections, which lanes that outlive it must not keep open for each other.
    """
    for each in parents:
        each.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of Ctrl-C and ends its lanes
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = session.config
    config.pluginmanager.unregister(name="terminalreporter")
    _own_capture(config)
    config.pluginmanager.register(_Telling(config, connection))
    try:
        while bundle := connection.recv():
            _run_bundle(session, connection, bundle)
    except (KeyboardInterrupt, EOFError, BrokenPipeError):  # the parent ends the session early, or has ended
        session._setupstate.teardown_exact(None)
    for close in AT_END:
        close()
    os._exit(0)


def _run_bundle(session: pytest.Session, connection: Connection, bundle: list[int]) -> None:
    for number, following in itertools.zip_longest(bundle, bundle[1:]):
        connection.send(("start", number))
        item = session.items[number]
        nextitem = None if following is None else session.items[following]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
    connection.send(("done", None))


def _own_capture(config: pytest.Config) -> None:
    """Captures into files of this process: the parent's are shared with every lane."""
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    manager.stop_global_capturing()
    manager.start_global_capturing()


class _Telling:
    """Sends every report to the parent."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", data))
