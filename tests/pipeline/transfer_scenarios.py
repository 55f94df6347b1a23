"""Counts what travels between stages, and how much of it is held, in a whole Trainer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.mesh.messages import transport
from lightning_megatron.mesh.messages.host_channel import HostChannel, Sent
from lightning_megatron.pipeline.run.executor import PipelineExecutor
from lightning_megatron.pipeline.run.links import StageLinks, Transfer
from tests.benchmarks.sleeping import WIDTH, Sleeper, Sleeps
from tests.harness import RankInfo, ReusedProcesses
from tests.harness.links import linked
from tests.parity.scenario import trainer_for
from tests.parity.zoo.language import NanoGPT
from tests.parity.zoo.tasks import OwnLossTask


class Alive:
    """Counts objects of a kind that live at once."""

    def __init__(self) -> None:
        self.now, self.most = 0, 0

    def watch(self, value: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(value, self._gone)

    def _gone(self) -> None:
        self.now -= 1


class Traffic:
    """What one rank sends and receives.

    Attributes:
        shapes: how often shapes were sent.
        sent_bytes: bytes of the floating-point tensors sent.
        outputs: tensors under way to another stage.
        posted: receives that nobody has waited for yet.
    """

    def __init__(self) -> None:
        self.shapes, self.sent_bytes, self.running, self.sending = 0, 0, False, False
        self.outputs, self.posted = Alive(), Alive()

    @contextmanager
    def counted(self) -> Iterator[Traffic]:
        """Counts what is done within the schedules of the steps in here."""
        through_backend, hand_over, run, send, send_object, receive, wait = (
            transport._send,
            HostChannel.send,
            PipelineExecutor.run,
            StageLinks.send,
            StageLinks.send_object,
            StageLinks.receive,
            Transfer.wait,
        )

        def counted_through_backend(group: Any, data: Tensor, *where: int) -> Any:
            if self.sending:
                self.outputs.watch(data)
                self.sent_bytes += data.nbytes if data.is_floating_point() else 0
            return through_backend(group, data, *where)

        def counted_hand_over(channel: HostChannel, data: Tensor, tag: int) -> Sent:
            sent = hand_over(channel, data, tag)
            if self.sending:
                self.outputs.watch(sent)
                self.sent_bytes += data.nbytes if data.is_floating_point() else 0
            return sent

        def counted_run(*args: Any) -> None:
            self.running = True
            run(*args)
            self.running = False

        def counted_send(*args: Any, **kwargs: Any) -> None:
            self.sending = self.running  # collectives send too, and are not counted
            send(*args, **kwargs)
            self.sending = False

        def counted_object(*args: Any) -> None:
            self.shapes += 1
            send_object(*args)

        def counted_receive(*args: Any, **kwargs: Any) -> Transfer:
            transfer = receive(*args, **kwargs)
            if not self.running:
                return transfer
            marker = type("Posted", (), {})()
            self.posted.watch(marker)
            transfer.marker = marker  # type: ignore[attr-defined]
            return transfer

        def counted_wait(transfer: Transfer) -> list[Tensor]:
            found = wait(transfer)
            transfer.__dict__.pop("marker", None)
            return found

        with (
            mock.patch.object(transport, "_send", counted_through_backend),
            mock.patch.object(HostChannel, "send", counted_hand_over),
            mock.patch.object(PipelineExecutor, "run", counted_run),
            mock.patch.object(StageLinks, "send", counted_send),
            mock.patch.object(StageLinks, "send_object", counted_object),
            mock.patch.object(StageLinks, "receive", counted_receive),
            mock.patch.object(Transfer, "wait", counted_wait),
        ):
            yield self


def held(info: RankInfo, schedule: str, micro_batches: int, through_memory: bool) -> dict[str, int]:
    """Three steps of sleeping stages: the most outputs and posted receives at once, and what is left afterwards."""
    sleeps = Sleeps(info.world_size, micro_batches, 0.01, 0.01, 0.0)
    arguments = {"micro_batch_size": 1, "pipeline_schedule": schedule, "whole_batch_loss": False}  # without trials
    strategy = MegatronStrategy(pipeline_parallel_size=info.world_size, **arguments)
    trainer = Trainer(
        accelerator="cpu",
        devices=info.world_size,
        strategy=linked(strategy, through_memory=through_memory),
        plugins=[ReusedProcesses(info)],
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=info.directory,
    )
    batches: Any = DataLoader(torch.randn(3, micro_batches, WIDTH), batch_size=None)  # type: ignore[arg-type]
    with Traffic().counted() as traffic:
        trainer.fit(Sleeper(sleeps), train_dataloaders=batches)
    return {
        "outputs": traffic.outputs.most,
        "posted": traffic.posted.most,
        "left": traffic.outputs.now + traffic.posted.now,
        "shapes": traffic.shapes,
    }


def shapes_sent(info: RankInfo, steps: int, variable: bool) -> int:
    """How often this rank sent shapes: batches of 8 samples in micro-batches of 3, 3 and 2; the last has 4 samples."""
    arguments = {"micro_batch_size": 3, "variable_shapes": variable, "whole_batch_loss": False}
    trainer = trainer_for(info, (2, 1), arguments, max_steps=steps, limit_val_batches=0)
    torch.manual_seed(3)
    with Traffic().counted() as traffic:
        trainer.fit(OwnLossTask(NanoGPT(4)))
    return traffic.shapes


def bytes_sent(info: RankInfo, scatter_from: int, through_memory: bool) -> int:
    """Floating-point bytes that this rank sent to other stages in two steps with two tensor ranks."""
    trainer = trainer_for(info, (2, 1), {"tensor_parallel_size": 2}, max_steps=2, limit_val_batches=0)
    torch.manual_seed(3)
    strategy: Any = trainer.strategy
    linked(strategy, scatter_from=scatter_from, through_memory=through_memory)
    with Traffic().counted() as traffic:
        trainer.fit(OwnLossTask(NanoGPT(4)))
    return traffic.sent_bytes
