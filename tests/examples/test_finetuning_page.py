"""The page on fine-tuning: each of its commands and lines of code runs, in their order, on a tiny folder."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from lightning_megatron.tools.commands.cli import app
from tests.examples.script import run_in_workers
from tests.generation.folders import commanded, make_folder
from tests.harness import run_trainers

PAGE = Path(__file__).parents[2] / "docs" / "finetuning.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run_command(line: str, folder: Path) -> str:
    """A line of the page; returns what it prints."""
    program, *arguments = shlex.split(line)
    if program == "python":
        (script,) = arguments
        run = run_in_workers(str(folder / script), folder, processes=4)
        assert run.code == 0, run.output
        return run.output
    assert program == "lightning-megatron"
    if arguments[0] != "generate":
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return done.output
    arguments[arguments.index("--hf") + 1] = str(folder / arguments[arguments.index("--hf") + 1])
    outcomes = run_trainers(commanded, arguments, devices=4)
    assert all(outcome.value == 0 for outcome in outcomes)
    return outcomes[0].output


@pytest.mark.wide
def test_every_command_and_every_line_of_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "llama", dtype=torch.float32)
    lines = ("ABCABCABC", "XYZXYZXYZXYZ", "OnceOnce", "HHHH") * 6
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))

    (_, script), _, (_, commands), (_, used), _ = BLOCKS
    (tmp_path / "finetune.py").write_text(script)
    printed = [run_command(line, tmp_path) for line in commands.splitlines()]
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT, on what the next transformers will change
        exec(used, names)
        models = names["load"]()
        text = names["complete"](models[1], "Once")

    ids = torch.tensor([[1, 2, 3, 1, 2, 3]])
    base = AutoModelForCausalLM.from_pretrained("llama")
    with torch.no_grad():
        adapted, merged, before = (m.eval()(input_ids=ids).logits for m in (*models, base))
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)
    assert (before - merged).abs().max() > 0.01, "it has learnt something"
    assert text.replace("<end>", "") in printed[-1]
    assert "loss" in printed[0]


@pytest.mark.wide
def test_a_model_that_is_built_without_memory_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "llama", dtype=torch.float32)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": "ABCABCABC"}) + "\n" for _ in range(8)))
    (_, script), (_, built), *_ = BLOCKS
    script = re.sub(
        r"    def __init__.*?(?=    def training_step)",
        lambda _: built.partition("\n")[2] + "\n",
        script,
        flags=re.DOTALL,
    )
    script = script.replace("import AutoModelForCausalLM, ", "import AutoConfig, AutoModelForCausalLM, ")
    script = script.replace("import MegatronStrategy", "import MegatronStrategy, load_hf_weights")
    (tmp_path / "finetune.py").write_text(script)
    run_command("python finetune.py", tmp_path)
    assert (tmp_path / "adapted.ckpt").exists()


def test_a_checkpoint_leaves_out_what_is_not_trained() -> None:
    names: dict[str, Any] = {"L": lightning}
    exec(BLOCKS[4][1], names)
    module = names["Small"]()
    module.linear = torch.nn.Linear(2, 2)
    module.linear.bias.requires_grad = False
    checkpoint = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    assert checkpoint["state_dict"].keys() == {"linear.weight"}
    assert not module.strict_loading


def test_an_export_in_several_files_is_opened_with_its_tokenizer_and_generation_config(tmp_path: Path) -> None:
    from tests.generation.folders import train

    folder, path = make_folder(tmp_path / "llama"), tmp_path / "step.ckpt"
    run_trainers(train, str(folder), str(path), devices=2)
    arguments = ["checkpoint", "export", str(path), str(tmp_path / "whole"), "--tokenizer", str(folder)]
    assert CliRunner().invoke(app, [*arguments, "--shard-gb", "0.00002"]).exit_code == 0
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert GenerationConfig.from_pretrained(tmp_path / "whole").eos_token_id == model.config.eos_token_id == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "whole")("ABC")["input_ids"] == [1, 2, 3]
