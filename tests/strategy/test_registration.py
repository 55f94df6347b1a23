"""Importing the package teaches Lightning its name and its directories, whichever is imported first, and no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import StrategyRegistry

import lightning_megatron
from lightning_megatron.checkpoints.files import sources
from tests.harness.launched import environment

IMPORTS = ["import lightning, lightning_megatron", "import lightning_megatron, lightning"]
CHECK = """
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import StrategyRegistry
import sys
assert StrategyRegistry.get("megatron").options.micro_batch_size == "auto"
assert type(saving.pl_load).__module__ == "lightning_megatron.strategy.lightning.at_import.load_directories"
ours = [finder for finder in sys.meta_path if type(finder).__module__.startswith("lightning_megatron")]
assert not [finder for finder in ours if finder.awaited.endswith("strategies")]
"""


@pytest.mark.everyday(1)
@pytest.mark.parametrize("order", IMPORTS)
def test_the_name_is_known_in_either_order_of_imports(order: str) -> None:
    subprocess.run([sys.executable, "-c", f"{order}\n{CHECK}"], check=True, timeout=120, env=environment())


def test_a_strategy_of_that_name_is_ours() -> None:
    for name in ("megatron", "megatronstrategy"):
        assert isinstance(StrategyRegistry.get(name), lightning_megatron.MegatronStrategy)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


def test_lightning_reads_directories_through_us_and_files_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, asked = Module(), []

    def whole(path: Any, *, trust: bool) -> dict[str, Any]:
        asked.append((path, trust))
        return {"state_dict": module.state_dict(), "pytorch-lightning_version": pl.__version__}

    monkeypatch.setattr(sources, "load_whole", whole)
    read = Module.load_from_checkpoint(tmp_path)
    assert torch.equal(read.layer.weight, module.layer.weight) and asked == [(tmp_path, False)]
    torch.save(whole(None, trust=False), tmp_path / "file.ckpt")
    read = Module.load_from_checkpoint(tmp_path / "file.ckpt")
    assert torch.equal(read.layer.weight, module.layer.weight) and len(asked) == 2


def test_the_reader_is_wrapped_once() -> None:
    from lightning_megatron.strategy.lightning.at_import.load_directories import read_directories

    before = saving.pl_load
    read_directories()
    assert saving.pl_load is before


FORGET = """
from lightning.pytorch import cli
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.core import saving
from lightning_megatron.strategy.lightning.at_import import registration
from lightning_megatron.strategy.lightning.at_import.registration import register_when_lightning_is_imported
taught = saving.pl_load, cli.LightningCLI._parse_ckpt_path
registration.forget()
lightnings = saving.pl_load, cli.LightningCLI._parse_ckpt_path
assert [function.__module__.split(".")[0] for function in lightnings] == ["lightning", "lightning"], lightnings
assert not {"megatron", "megatronstrategy"} & set(StrategyRegistry)
register_when_lightning_is_imported()
assert type(saving.pl_load) is type(taught[0]) and cli.LightningCLI._parse_ckpt_path.reads_directories
assert {"megatron", "megatronstrategy"} <= set(StrategyRegistry)
"""
WAITING = """
import sys
before = list(sys.meta_path)
import lightning_megatron
from lightning_megatron.strategy.lightning.at_import import registration
assert [finder.awaited for finder in sys.meta_path if finder not in before] == [
    "lightning.pytorch.cli", "lightning.pytorch.strategies"
]
registration.forget()
assert sys.meta_path == before
from lightning.pytorch.strategies import StrategyRegistry
assert "megatron" not in StrategyRegistry
"""


@pytest.mark.wide
def test_nothing_waits_for_lightning_any_more_once_it_is_forgotten() -> None:
    subprocess.run([sys.executable, "-c", WAITING], check=True, timeout=120, env=environment())


@pytest.mark.wide
def test_lightning_gets_its_own_functions_back() -> None:
    subprocess.run([sys.executable, "-c", f"{IMPORTS[0]}\n{FORGET}"], check=True, timeout=120, env=environment())
