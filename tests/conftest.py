"""Session-wide settings: one thread per process, warnings are errors, the exhaustive tables only on request."""

from __future__ import annotations

import os

import pytest

from tests.harness import device, remember
from tests.harness.filters import filter_lines
from tests.harness.lanes import SideBySide
from tests.harness.pool import share_fork_server
from tests.harness.tenths import TENTHS, leave_for_tenths, name_of, tenth_of


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("this project")
    group.addoption("--wide", action="store_true", help="run the exhaustive tables as well")
    group.addoption(
        "--wide-tenth",
        type=int,
        choices=range(TENTHS),
        metavar="N",
        help=f"run one tenth of the exhaustive tables as well, N from 0 to {TENTHS - 1}; with `-m wide`, that alone",
    )
    group.addoption(
        "--gpu",
        action="store_true",
        help="run the Trainers of most tests on this machine's GPU, which all ranks of a layout share",
    )
    group.addoption(
        "--lanes",
        type=int,
        default=(os.cpu_count() or 1) + 1,
        metavar="N",
        help="run N tests at the same time; 1 runs them one after the other in this process (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config.addinivalue_line("markers", "wide(together): a row of an exhaustive table; runs on request only (`--wide`)")
    config.addinivalue_line("markers", "everyday(count): of this table so many rows run each time; the others are wide")
    config.addinivalue_line("markers", "launch: starts processes through a real launcher; slow")
    config.addinivalue_line("markers", "alone: measures time or memory; no other test runs beside it")
    for line in filter_lines():
        config.addinivalue_line("filterwarnings", line)
    option = config.option
    if option.gpu:
        device.use_gpu()
    if not (option.markexpr or option.wide or option.wide_tenth is not None):
        option.markexpr = "not wide"
    config.add_cleanup(remember.open_folder())
    config.pluginmanager.register(SideBySide(option.lanes, share_fork_server))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tells the rows of every run from those of the exhaustive tables, of which it may leave one tenth."""
    leave_for_tenths(items)
    if config.option.wide_tenth is None:
        return
    chosen = [
        item
        for item in items
        if not item.get_closest_marker("wide") or tenth_of(name_of(item)) == config.option.wide_tenth
    ]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
