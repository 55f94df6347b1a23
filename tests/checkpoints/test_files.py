"""Checkpoint directories from outside: the command, damage, malice, and what other programs make of them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_megatron.checkpoints.files.directory import (
    IncompleteCheckpointError,
    data_folder,
    newest_complete,
    open_checkpoint,
    publish,
)
from lightning_megatron.checkpoints.files.folder import Folder
from lightning_megatron.checkpoints.files.sources import open_source
from lightning_megatron.checkpoints.files.storage import BoxWriter
from lightning_megatron.checkpoints.state.stored import Match
from lightning_megatron.strategy.saving.checkpoint_io import MegatronCheckpointIO
from tests.checkpoints.commands import command
from tests.checkpoints.reshard_scenarios import Losses, Tied, tensors_of
from tests.checkpoints.scenarios import (
    Dangerous,
    HuggingFace,
    Pretrained,
    last_of_a_remote_folder,
    partial,
    read_bytes,
    resume_imported,
    write_both,
)
from tests.harness import run_trainers


def test_a_message_names_some_of_many_tensors_that_do_not_fit() -> None:
    many = str(Match({}, [f"layers.{number}" for number in range(20)], [], {"head": ((2,), (3,))}))
    assert many.startswith("missing ['layers.0', ") and "] and 12 more, unexpected nothing, reshaped ['head " in many


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    run_trainers(write_both, str(folder), devices=4)
    yield folder


@pytest.fixture
def tied(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved / "tied.ckpt", tmp_path / "tied.ckpt"))


def test_inspect_shows_step_layout_shapes_and_tied_names(saved: Path) -> None:
    report = json.loads(command("inspect", saved / "tied.ckpt", "--json"))
    assert report["about"]["step"] == 2
    assert report["about"]["layout"] | {"tensor": 2, "pipeline": 2, "data": 1} == report["about"]["layout"]
    assert {"torch", "lightning", "python"} <= set(report["about"]["versions"])
    assert (
        report["tensors"]["embedding.weight"] | {"shape": [101, 12], "dtype": "float32"}
        == (report["tensors"]["embedding.weight"])
    )
    assert report["tied"] == {"head.weight": "embedding.weight"}
    whole = command("inspect", saved / "tied.ckpt")
    assert (
        whole.index("embedding.weight")
        < whole.index("layers.0.")
        < whole.index("layers.1.")
        < whole.index("optimizer.")
    )
    assert "adapters" not in whole, "a line without anything in it"
    table = command("inspect", saved / "tied.ckpt", "--match", "layers.0.attention")
    assert "36 × 12" in table and "optimizer.0.layers.0" in table and "…" not in table


def test_a_flipped_byte_in_any_file_is_found(tied: Path) -> None:
    assert "DAMAGED" not in command("verify", tied)
    for file in sorted(tied.iterdir()):
        if file.name == "COMPLETE":
            continue
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        output = command("verify", tied, fails=True)
        assert f"DAMAGED {file.name}" in output or "manifest.json has changed" in output
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert "DAMAGED" not in command("verify", tied)


def test_a_checkpoint_without_marker_or_with_a_short_file_is_refused_and_passed_over(tied: Path) -> None:
    other = Path(shutil.copytree(tied, tied.with_name("older.ckpt")))
    largest = max(tied.glob("rank-*.bin"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(IncompleteCheckpointError, match=largest.name):
        open_checkpoint(tied)
    with pytest.warns(UserWarning, match="incomplete"):
        assert newest_complete(tied.parent) == str(other)
    (other / "COMPLETE").unlink()
    with pytest.raises(IncompleteCheckpointError, match="COMPLETE"):
        MegatronCheckpointIO().load_checkpoint(other)
    with pytest.warns(UserWarning, match="incomplete"):
        assert newest_complete(tied.parent) is None


def test_the_newest_is_the_last_that_was_written_and_not_one_of_more_steps_of_an_earlier_run(tied: Path) -> None:
    earlier = Path(shutil.copytree(tied, tied.with_name("earlier.ckpt")))
    marker = json.loads((earlier / "COMPLETE").read_text())
    (earlier / "COMPLETE").write_text(json.dumps(marker | {"step": marker["step"] + 100, "time": marker["time"] - 60}))
    assert newest_complete(tied.parent) == str(tied)


def test_a_search_reads_each_marker_once(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (Path(shutil.copytree(tied, tied.with_name(f"torn-{number}.ckpt"))) / "COMPLETE").unlink()
    read, markers = Folder.read, list[str]()
    monkeypatch.setattr(
        Folder, "read", lambda folder, name: (name == "COMPLETE" and markers.append(str(folder))) or read(folder, name)
    )
    with pytest.warns(
        UserWarning,
        match=r"torn-\d.ckpt has no marker `COMPLETE`: it is no checkpoint, or is incomplete, as .* interrupted\.$",
    ):
        assert newest_complete(tied.parent) == str(tied)
    assert sorted(markers) == [str(tied), *(str(tied.with_name(f"torn-{number}.ckpt")) for number in range(3))]


def test_a_pickle_that_runs_code_does_not_run(tied: Path, tmp_path: Path) -> None:
    buffer, trace = io.BytesIO(), tmp_path / "ran"
    torch.save({"loops": Dangerous(str(trace))}, buffer)
    data = data_folder(Folder(tmp_path / "evil.ckpt"), "0" * 8)
    shutil.copytree(tied, data.path)
    writer = BoxWriter(data)
    for file in tied.iterdir():
        if file.name not in ("COMPLETE", "manifest.json"):
            writer.add_file(file.name, buffer.getvalue() if file.name == "meta.pt" else file.read_bytes())
    publish(Folder(tmp_path / "evil.ckpt"), data, writer.files, 2, 0.0)
    with pytest.raises(RuntimeError, match="not plain data"):
        MegatronCheckpointIO().load_checkpoint(tmp_path / "evil.ckpt")
    assert "not plain data" in command("inspect", tmp_path / "evil.ckpt", fails=True)
    torch.save({"state_dict": {}, "loops": Dangerous(str(trace))}, tmp_path / "evil_file.ckpt")
    with pytest.raises(RuntimeError, match="not plain data"):
        MegatronCheckpointIO().load_checkpoint(tmp_path / "evil_file.ckpt")
    assert "not plain data" in command("inspect", tmp_path / "evil_file.ckpt", fails=True)
    assert not trace.exists()


def test_an_exported_file_loads_and_resumes_under_plain_lightning(saved: Path, tmp_path: Path) -> None:
    command("export", saved / "tied.ckpt", tmp_path / "plain.ckpt")
    stored = tensors_of(saved / "tied.ckpt")
    module = Tied.load_from_checkpoint(tmp_path / "plain.ckpt", map_location="cpu", weights_only=True)
    assert module.hparams["seed"] == 4
    assert torch.equal(module.head.weight, stored["embedding.weight"])
    for name, value in module.state_dict().items():
        assert name == "head.weight" or torch.equal(value, stored[name]), name
    losses = Losses()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_steps=4, callbacks=[losses], **options)
    fresh = PlainTied(seed=6)
    with pytest.warns(UserWarning, match="not resumable"):  # that is what plain Lightning can do
        trainer.fit(fresh, ckpt_path=str(tmp_path / "plain.ckpt"), weights_only=True)
    assert trainer.global_step == 4
    command("export", saved / "tied.ckpt", tmp_path / "weights.ckpt", "--no-optimizer")
    assert (tmp_path / "weights.ckpt").stat().st_size < (tmp_path / "plain.ckpt").stat().st_size / 2


class PlainTied(Tied):
    """The same without a word of our strategy."""

    def train_dataloader(self) -> Any:
        from torch.utils.data import DataLoader

        from tests.checkpoints.reshard_scenarios import Words

        return DataLoader(Words(), batch_size=12)


def test_load_from_checkpoint_reads_the_directory_itself(saved: Path) -> None:
    module = Tied.load_from_checkpoint(saved / "tied.ckpt")
    assert module.hparams["seed"] == 4
    assert torch.equal(module.head.weight, tensors_of(saved / "tied.ckpt")["embedding.weight"])


def test_an_imported_file_is_the_checkpoint_again_and_resumes_at_other_layouts(saved: Path, tmp_path: Path) -> None:
    command("export", saved / "tied.ckpt", tmp_path / "plain.ckpt")
    command("import", tmp_path / "plain.ckpt", tmp_path / "again.ckpt")
    before, after = open_source(saved / "tied.ckpt"), open_source(tmp_path / "again.ckpt")
    weights = [name for name in before.kinds if not name.startswith("optimizer.")]
    assert weights and all(torch.equal(before.read(name), after.read(name)) for name in weights)
    assert dict(after.aliases) == {"head.weight": "embedding.weight"}
    direct = run_trainers(resume_imported, str(saved / "tied.ckpt"), (1, 2, 1), devices=2)
    imported = run_trainers(resume_imported, str(tmp_path / "again.ckpt"), (1, 2, 1), devices=2)
    assert direct[0].value == imported[0].value and len(direct[0].value) == 2


def test_export_to_hugging_face_loads_with_from_pretrained_and_comes_back(saved: Path, tmp_path: Path) -> None:
    import transformers

    command("export", saved / "hf.ckpt", tmp_path / "hf")
    stored = tensors_of(saved / "hf.ckpt")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert isinstance(model, transformers.GPT2LMHeadModel)
    for name, value in model.state_dict().items():
        assert name == "lm_head.weight" or torch.equal(value, stored[f"net.{name}"]), name
    module = HuggingFace.load_from_checkpoint(saved / "hf.ckpt").net.eval()
    tokens = torch.arange(8)[None]
    assert torch.equal(model.eval()(tokens).logits, module(tokens).logits)

    command("export", saved / "hf.ckpt", tmp_path / "many", "--shard-gb", "0.000005", "--dtype", "bfloat16")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.transformer.wte.weight, stored["net.transformer.wte.weight"].bfloat16())

    command("import", tmp_path / "hf", tmp_path / "back.ckpt", "--prefix", "net.")
    back = tensors_of(tmp_path / "back.ckpt")
    assert back and all(torch.equal(value, stored[name]) for name, value in back.items())


def test_memory_urls_work_like_folders(saved: Path) -> None:
    from lightning_megatron.checkpoints.files.importing import import_checkpoint

    source = open_source(saved / "hf.ckpt")
    folder = Path(saved) / "hf_again"
    command("export", saved / "hf.ckpt", folder)
    for _ in range(2):
        import_checkpoint(open_source(folder), "memory://run/a.ckpt", prefix="net.")
    assert torch.equal(
        open_source("memory://run/a.ckpt").read("net.transformer.wte.weight"), source.read("net.transformer.wte.weight")
    )
    assert len(Folder("memory://run/a.ckpt").folders()) == 1, "what was replaced is gone"
    assert "DAMAGED" not in command("verify", "memory://run/a.ckpt")


def test_a_run_goes_on_from_the_last_checkpoint_in_a_remote_folder() -> None:
    (outcome,) = run_trainers(last_of_a_remote_folder, devices=1)
    left = ["/remote/last.ckpt", "/remote/step=6.ckpt"]
    assert outcome.value == {"left": left, "batches": 6, "steps": 6}


@pytest.mark.parametrize("through", ["module", pytest.param("strategy", marks=pytest.mark.wide)])
def test_pretrained_weights_are_read_by_slice_into_a_module_that_was_never_whole(
    through: str, saved: Path, tmp_path: Path
) -> None:
    command("export", saved / "hf.ckpt", tmp_path / "hf")
    stored = tensors_of(saved / "hf.ckpt")
    total = (tmp_path / "hf" / "model.safetensors").stat().st_size
    outcomes = run_trainers(read_bytes, str(tmp_path / "hf"), (2, 1, 2), through, devices=4)
    shares = [outcome.value[0] / total for outcome in outcomes]
    assert 0 < max(shares) < 0.9 and sum(shares) < 2.8, shares  # the 101 words all lie in the first 128, on two ranks
    state = outcomes[0].value[1]
    for name, value in stored.items():
        assert name.startswith("optimizer.") or torch.equal(state[name], value), name


def test_pretrained_weights_fill_a_plain_module_too(saved: Path, tmp_path: Path) -> None:
    from lightning_megatron import load_hf_weights

    command("export", saved / "hf.ckpt", tmp_path / "hf")
    module = Pretrained()
    module.configure_model()
    load_hf_weights(module, tmp_path / "hf")
    stored = tensors_of(saved / "hf.ckpt")
    assert torch.equal(module.net.transformer.wte.weight, stored["net.transformer.wte.weight"])
    assert module.net.lm_head.weight.device.type == "cpu"
    with pytest.raises(RuntimeError, match="do not fit"):
        load_hf_weights(Tied(), tmp_path / "hf")


def test_partial_loading_renames_and_reports_what_is_missing_unexpected_and_reshaped(saved: Path) -> None:
    report = run_trainers(partial, str(saved / "tied.ckpt"), False, devices=2)[0].value
    assert len(report) == 1
    assert "missing ['more']" in report[0] and "unexpected nothing" in report[0]
    assert "position (6, 12) in the checkpoint, (7, 12) here" in report[0]
    for outcome in run_trainers(partial, str(saved / "tied.ckpt"), True, devices=2):
        assert "does not fit" in outcome.value[0] and "prefixes" in outcome.value[0]
