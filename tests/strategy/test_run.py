"""A run takes over what it needs, gives all of it back, and leaves a module that can be saved and trained on."""

from __future__ import annotations

import inspect

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from lightning_megatron import MegatronStrategy
from lightning_megatron.strategy.lightning import launcher
from tests.harness import run_trainers
from tests.strategy.door_scenarios import Plain
from tests.strategy.run_scenarios import lives


def test_a_run_gives_back_what_it_took_over() -> None:
    for outcome in run_trainers(lives, devices=2):
        found = outcome.value
        assert "has no run yet" in found["early"]
        assert not any(found["before"].values()), found["before"]
        assert all(found["during"].values()), found["during"]
        assert not any(found["after"].values()), found["after"]
        assert found["class"] and found["saved"]
        assert found["another run"] and found["same module"] and found["steps"] == 2


def test_the_last_checkpoint_is_looked_for_by_marker_under_our_launcher_only(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = ModelCheckpoint(dirpath="saved")
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[callback], barebones=False)
    monkeypatch.setattr(
        launcher, "newest_checkpoint", lambda *found, saves_last: {f"the newest of {len(found)} facts, {saves_last}"}
    )
    with launcher.answers_from_markers(trainer):
        assert callback._find_last_checkpoints(trainer) == {"the newest of 4 facts, False"}
    assert callback._find_last_checkpoints(trainer) == set()
    assert "callback._find_last_checkpoints(self.trainer)" in inspect.getsource(_CheckpointConnector)


def test_a_strategy_without_a_trainer_says_so() -> None:
    strategy = MegatronStrategy()
    with pytest.raises(RuntimeError, match="MegatronStrategy has no run yet; a Trainer gives it one"):
        strategy.full_state_dict()
    with pytest.raises(RuntimeError, match="the mesh exists only once the Trainer has started"):
        _ = strategy.device_mesh
    assert strategy.skipped_steps == 0 and strategy.partition is None and strategy.parallel_report is None


def test_batches_are_counted_before_the_processes_have_met() -> None:
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = Trainer(devices=4, strategy=MegatronStrategy(pipeline_parallel_size=2), **options)
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 0}  # type: ignore[attr-defined]
    trainer = Trainer(devices=1, strategy=MegatronStrategy(), max_epochs=3, **options)
    module = Plain()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    trainer.training = True
    assert trainer.estimated_stepping_batches == 6


def test_an_unstarted_twin_shares_options_and_nothing_of_a_run() -> None:
    strategy = MegatronStrategy(2, bucket_size_mb=3.0)
    twin = strategy.unstarted(process_group_backend="gloo")
    assert twin.process_group_backend == "gloo" and strategy.process_group_backend is None
    assert twin.options.bucket_size_mb == 3.0 and twin._processes is not strategy._processes
