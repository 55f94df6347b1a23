"""Ctrl-C in a terminal ends all processes of a run at once, with one line: while they start, and while they train."""

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
import atexit
import gc
import os
import sys
import time

atexit.register(lambda: print("PASSED OVER", gc.get_freeze_count() > 10_000))  # the last thing that a process does
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
        if index == 3:
            print("STEP", flush=True)
        return batch.sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

late = sys.argv[1] == "late"
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy=MegatronStrategy(2), logger=False, enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=late, default_root_dir=sys.argv[2],
)
if trainer.local_rank > 0 and not late:
    time.sleep(60)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(2_000_000 if late else 2, 2)))
"""


def pressed(folder: Path, when: str, sign: str) -> list[str]:
    """Lines that the script writes to its terminal after Ctrl-C, pressed there once ``sign`` has been read."""
    (folder / "train.py").write_text(SCRIPT)
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background of a shell have it ignored
        os.environ["COLUMNS"] = "300"
        os.execv(sys.executable, [sys.executable, str(folder / "train.py"), when, str(folder)])
    said, deadline, presses = "", time.monotonic() + 90.0, 0
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 0.2)[0]:
                continue
            try:
                said += os.read(terminal, 65536).decode(errors="replace")
            except OSError:
                break
            if not presses and sign in said:
                presses, said = 1, ""
                time.sleep(1.0)  # it waits inside of torch, or trains
                os.write(terminal, b"\x03")
        assert presses, said
        while living(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not living(pid)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    finally:
        if living(pid):
            os.killpg(pid, signal.SIGKILL)
        os.close(terminal)
    return [line for line in said.replace("^C", "").splitlines() if line.strip()]


@pytest.mark.wide
@pytest.mark.launch
@pytest.mark.skipif(not hasattr(os, "forkpty"), reason="needs a terminal")
def test_ctrl_c_before_the_ranks_have_met_ends_all_with_one_line(tmp_path: Path) -> None:
    lines = pressed(tmp_path, "early", "GLOBAL_RANK: 0")
    assert lines == ["Stopped by Ctrl-C before the ranks had met; there was nothing to save."]


@pytest.mark.wide
@pytest.mark.launch
@pytest.mark.skipif(not hasattr(os, "forkpty"), reason="needs a terminal")
def test_ctrl_c_while_training_ends_no_process_with_a_search_of_its_memory(tmp_path: Path) -> None:
    lines = [line for line in pressed(tmp_path, "late", "STEP") if line != "STEP"]
    assert [line for line in lines if line.startswith("Stopped by Ctrl-C after step")], lines
    assert lines.count("PASSED OVER True") == 2 and "PASSED OVER False" not in lines, lines
    assert len(lines) == 3, lines
