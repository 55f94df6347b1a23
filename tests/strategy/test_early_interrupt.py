"""Ctrl-C while the processes of a run are starting ends all of them at once, with one line."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.examples.script import living

SCRIPT = """
import time
import lightning as L
import torch
from lightning_megatron import MegatronStrategy

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    def training_step(self, batch, index):
        for layer in self.layers:
            batch = layer(batch)
        return batch.sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = L.Trainer(accelerator="cpu", devices=2, strategy=MegatronStrategy(2), logger=False)
if trainer.local_rank > 0:
    time.sleep(60)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(2, 2)))
"""


@pytest.mark.launch
@pytest.mark.skipif(not hasattr(os, "forkpty"), reason="needs a terminal")
def test_ctrl_c_before_the_ranks_have_met_ends_all_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background of a shell have it ignored
        os.execv(sys.executable, [sys.executable, str(tmp_path / "train.py")])
    said, deadline, pressed = "", time.monotonic() + 60.0, False
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 0.2)[0]:
                continue
            try:
                said += os.read(terminal, 65536).decode(errors="replace")
            except OSError:
                break
            if not pressed and "GLOBAL_RANK: 0" in said:
                pressed, said = True, ""
                time.sleep(1.0)  # it waits inside of torch
                os.write(terminal, b"\x03")
        assert pressed
        while living(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not living(pid)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    finally:
        if living(pid):
            os.killpg(pid, signal.SIGKILL)
        os.close(terminal)
    lines = [line for line in said.replace("^C", "").splitlines() if line.strip()]
    assert lines == ["Stopped by Ctrl-C before the ranks had met; there was nothing to save."]
