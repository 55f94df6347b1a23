"""Session-wide settings: one thread per process, warnings are errors, the exhaustive tables only on request."""

from __future__ import annotations

import os

import pytest

from tests.harness.filters import filter_lines


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config.addinivalue_line("markers", "wide: a row of an exhaustive table; runs with `-m wide` only")
    config.addinivalue_line("markers", "launch: starts processes through a real launcher; slow")
    for line in filter_lines():
        config.addinivalue_line("filterwarnings", line)
    if not config.option.markexpr:
        config.option.markexpr = "not wide"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
