"""Modules and callbacks that fail on one rank, each in its own place."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.mesh.layout import Layout
from lightning_megatron.mesh.watch.failure import FailureWatch
from tests.harness import RankInfo
from tests.parity.scenario import trainer_for
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.tasks import TokenTask

PLACES = ("training_step", "layer", "backward", "loader", "callback", "validation_step", "setup")


class FailingBackward(torch.autograd.Function):
    """Passes its input on and raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("deliberate failure in backward")


class Failing(TokenTask):
    """Raises once, on one rank, in one place.

    Args:
        rank: this process.
        culprit: the process that fails.
        place: one of `PLACES`.
    """

    def __init__(self, rank: int, culprit: int, place: str) -> None:
        super().__init__(LearnedPositions())
        self.guilty, self.place = rank == culprit, place
        if self.guilty and place in ("layer", "backward"):
            for layer in self.net.layers:
                layer.register_forward_hook(self._spoil)

    def _spoil(self, layer: Any, inputs: Any, output: Tensor) -> Tensor:
        if not self.training or self.trainer.global_step < 1:
            return output
        if self.place == "layer":
            raise ArithmeticError("deliberate failure in layer")
        spoiled: Tensor = FailingBackward.apply(output)
        return spoiled

    def _fail(self, place: str) -> None:
        if self.guilty and self.place == place:
            raise ArithmeticError(f"deliberate failure in {place}")

    def setup(self, stage: str) -> None:
        self._fail("setup")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self._fail("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self._fail("validation_step")
        super().validation_step(batch, batch_idx)

    def collate(self, samples: list[Any]) -> Any:
        if self.trainer.training and self.trainer.global_step >= 1:
            self._fail("loader")
        return super().collate(samples)


class FailingCallback(Callback):
    """Raises after the second batch."""

    def __init__(self, guilty: bool) -> None:
        self.guilty = guilty

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.guilty and trainer.global_step == 2:
            raise ArithmeticError("deliberate failure in callback")


def fail(info: RankInfo, layout: tuple[int, int], culprit: int, place: str) -> None:
    """Trains until ``culprit`` fails in ``place``."""
    callback = FailingCallback(info.rank == culprit and place == "callback")
    trainer = trainer_for(info, layout, {}, max_epochs=3, callbacks=[callback])
    trainer.fit(Failing(info.rank, culprit, place))


class Hanging(TokenTask):
    """From the second step on, a layer of one rank never returns; another rank may be stopped as a whole.

    Args:
        rank: this process.
        culprit: the process that hangs.
        stopped: whether its interpreter stands still too, as in a call that never gives it back.
    """

    def __init__(self, rank: int, culprit: int, stopped: bool) -> None:
        super().__init__(LearnedPositions())
        self.guilty, self.stopped = rank == culprit, stopped
        if self.guilty:
            for layer in self.net.layers:
                layer.register_forward_hook(self.hang_in_a_layer)

    def hang_in_a_layer(self, layer: Any, inputs: Any, output: Tensor) -> None:
        if self.training and self.trainer.global_step >= 1:
            if self.stopped:
                ctypes.PyDLL(None).sleep(3600)
            time.sleep(3600)


def train_hanging(info: RankInfo, sizes: tuple[int, ...], culprit: int, stopped: bool) -> None:
    """One rank hangs, the others notice after some seconds."""
    arguments = {"hang_timeout": timedelta(seconds=4), "tensor_parallel_size": sizes[2]}
    options: dict[str, Any] = {"max_steps": 4, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    trainer_for(info, sizes[:2], arguments, **options).fit(Hanging(info.rank, culprit, stopped))


class Killed(TokenTask):
    """One rank ends in its third step without a word.

    Args:
        guilty: whether it is this one.
        number: of the signal.
    """

    def __init__(self, guilty: bool, number: int) -> None:
        super().__init__(LearnedPositions())
        self.guilty, self.number = guilty, number

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.guilty and batch_idx == 2:
            os.kill(os.getpid(), self.number)
        return super().training_step(batch, batch_idx)


def train_killed(info: RankInfo, sizes: tuple[int, int], culprit: int, number: int = int(signal.SIGKILL)) -> None:
    """One rank's process is killed while all train."""
    trainer_for(info, sizes, {}, max_epochs=3, limit_val_batches=0).fit(Killed(info.rank == culprit, number))


class Uneven(TokenTask):
    """Rank 1 loads one batch where the others load four, in one kind of loop.

    Args:
        rank: this process.
        loop: ``train`` or ``val``.
    """

    def __init__(self, rank: int, loop: str) -> None:
        super().__init__(LearnedPositions())
        self.fewer, self.loop = rank == 1, loop

    def _loader(self, loop: str) -> DataLoader[Any]:
        whole: DataLoader[Any] = super().train_dataloader()
        samples = [whole.dataset[number % 4] for number in range(2 if self.fewer and loop == self.loop else 8)]
        return DataLoader(samples, batch_size=2, collate_fn=self.collate)

    def train_dataloader(self) -> Any:
        return self._loader("train")

    def val_dataloader(self) -> Any:
        return self._loader("val")


class SilentUneven(Uneven):
    """Its evaluation has no call that logs, after which the replicas would meet in every step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def train_uneven(info: RankInfo, sizes: tuple[int, int], loop: str, logs: bool = True) -> int:
    """Trains with loaders of different lengths; the steps taken, where that is possible."""
    options: dict[str, Any] = {"num_sanity_val_steps": 0, "use_distributed_sampler": False}
    trainer = trainer_for(info, sizes, {}, max_epochs=2, **options)
    trainer.fit((Uneven if logs else SilentUneven)(info.rank, loop))
    return trainer.global_step


class SilentLink:
    """Passes bytes on between a port of its own and another one, until it goes silent: nothing is closed."""

    def __init__(self, port: int) -> None:
        self.silent = threading.Event()
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            far = socket.create_connection(("127.0.0.1", self._to))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(65536):
            if self.silent.is_set():
                time.sleep(3600)
            sink.sendall(data)


def lose_the_store(info: RankInfo, seconds: float) -> None:
    """A rank whose link to the store goes silent after a while, and which only waits."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link = SilentLink(store.port)
    far = dist.TCPStore("127.0.0.1", link.port, is_master=False, wait_for_workers=False)
    watch = FailureWatch(far, Layout(data=2), 1, 1, poll_s=0.1, hang_s=seconds)
    watch.start()
    time.sleep(2 * seconds)
    print("ALIVE BEFORE THE LINK WENT SILENT", flush=True)
    link.silent.set()
    time.sleep(60)
