"""The commands print what they promise, as tables and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lightning_megatron.tools.commands.cli import app

RUNS = Path(__file__).parents[1] / "data" / "published_runs.csv"
RUNNER = CliRunner()
MODEL = ["--layers", "24", "--hidden", "2048", "--heads", "16", "--seq", "1024"]


@pytest.fixture
def few_runs(tmp_path: Path) -> Path:
    lines = RUNS.read_text().splitlines()
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([lines[0], *lines[1:7]]) + "\n")
    return path


def test_predict_prints_a_record_per_row(few_runs: Path) -> None:
    result = RUNNER.invoke(app, ["predict", "--runs", str(few_runs), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["id"] for row in found][:2] == ["sc21-t1-1.7B", "sc21-t1-18.4B"]
    for row in found:
        assert row["iteration_seconds"] > 0 and row["tflops_per_gpu"] > 0 and row["memory_gib"] > 0
        assert row["fits"] is True
        assert "measured_seconds" not in row


def test_predict_scores_on_request(few_runs: Path) -> None:
    result = RUNNER.invoke(app, ["predict", "--runs", str(few_runs), "--json", "--score"])
    found = json.loads(result.stdout)
    assert [family["family"] for family in found["families"]] == ["sc21-table1", "sc21-fig11", "all"]
    assert all(abs(row["error_percent"]) < 50 for row in found["rows"])


def test_predict_prints_tables_for_people(few_runs: Path) -> None:
    result = RUNNER.invoke(app, ["predict", "--runs", str(few_runs), "--score"])
    assert result.exit_code == 0, result.output
    assert "median error" in result.stdout and "sc21-t1-18.4B" in result.stdout


def test_predict_goes_on_after_a_bad_row(few_runs: Path) -> None:
    lines = few_runs.read_text().splitlines()
    few_runs.write_text("\n".join([*lines, lines[1].replace("A100-80", "Z9000").replace(",312,", ",,")]) + "\n")
    result = RUNNER.invoke(app, ["predict", "--runs", str(few_runs), "--json"])
    assert result.exit_code == 0
    assert "Z9000" in json.loads(result.stdout)[-1]["error"]


def test_predict_refuses_a_file_without_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("a,b\n1,2\n")
    result = RUNNER.invoke(app, ["predict", "--runs", str(path)])
    assert result.exit_code == 2


def test_plan_prints_a_table_json_and_a_picture(tmp_path: Path) -> None:
    plot = tmp_path / "plan.svg"
    arguments = ["plan", "--gpus", "16", "--global-batch", "64", *MODEL]
    result = RUNNER.invoke(app, [*arguments, "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "The runner-up" in " ".join(result.stdout.split())
    assert "Layouts: t tensor ranks, p stages, " in result.stdout and f"wrote {plot}" in result.stdout.replace("\n", "")
    assert "<svg" in plot.read_text()
    found = json.loads(RUNNER.invoke(app, [*arguments, "--json", "--top", "2"]).stdout)
    assert len(found["layouts"]) == 2 and found["gpus"] == 16


def test_plan_reads_a_hugging_face_config(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 1024,
        "n_layer": 24,
        "n_head": 16,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = [
        "plan",
        "--hf-config",
        str(tmp_path / "config.json"),
        "--gpus",
        "8",
        "--gpu",
        "H100",
        "--global-batch",
        "64",
    ]
    found = json.loads(RUNNER.invoke(app, [*arguments, "--json"]).stdout)
    assert found["parameters"] == 354_823_168


def test_plan_without_a_model_says_what_to_give() -> None:
    result = RUNNER.invoke(app, ["plan", "--gpus", "8", "--global-batch", "8"])
    assert result.exit_code == 2
    assert "--hf-config" in result.output


def _unwrapped(result: Result) -> str:
    """What was printed, without the box around it and its line breaks."""
    return " ".join(result.output.replace("│", " ").split())


def test_predict_refuses_a_file_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(RUNS.read_text().splitlines()[0] + "\n")
    result = RUNNER.invoke(app, ["predict", "--runs", str(path)])
    assert result.exit_code != 0 and "no rows" in _unwrapped(result)


def test_plan_refuses_heads_that_are_no_whole_number_of_channels() -> None:
    arguments = ["--gpus", "8", "--global-batch", "8", "--layers", "4", "--hidden", "2080", "--heads", "64"]
    result = RUNNER.invoke(app, ["plan", *arguments])
    assert result.exit_code != 0 and "heads of 32.5 channels" in _unwrapped(result)


def test_explain_does_not_ask_the_hub_for_a_file_that_is_not_there() -> None:
    result = RUNNER.invoke(app, ["explain", "--hf-config", "typo.json"])
    assert result.exit_code != 0 and "there is no such file" in _unwrapped(result)


def test_explain_draws_the_plan_that_it_prints(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    picture = tmp_path / "plan.svg"
    result = RUNNER.invoke(app, ["explain", "--hf-config", str(tmp_path), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    names = [line.split()[0] for line in result.stdout.splitlines()[2:] if "  " in line]
    assert len(names) > 4 and all(name in picture.read_text(encoding="utf-8") for name in names)


def _plan(*arguments: str) -> str:
    """What ``plan`` prints for a model of ``arguments``, without line breaks."""
    return _unwrapped(RUNNER.invoke(app, ["plan", *arguments]))


LONG = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--seq", "262144", "--gpu", "H100"]


def test_plan_shows_context_ranks_as_what_they_are() -> None:
    said = _plan("--gpus", "16", "--global-batch", "1", *LONG, "--context", "16")
    assert "t1 p1 d1 c16 b1" in said and "d16" not in said
    assert "16 context ranks share the 262,144 tokens of a sequence; " in said and " of the step. No pipeline" in said


def test_plan_says_what_shards_and_host_memory_cost() -> None:
    sizes = ["--layers", "64", "--hidden", "8192", "--heads", "64", "--kv-heads", "8", "--ffn", "28672", "--gated"]
    only = ["--sharding", "fsdp", "--offload", "--tensor", "1", "--pipeline", "1", "--seq", "8192", "--context", "1"]
    said = _plan("--gpus", "8", "--global-batch", "8", *sizes, *only)
    assert "Each rank keeps 1/8 of its weights and gathers the rest until its layer has run: 180 GiB a step" in said
    assert "100% of the optimizer step on the host, for" in said and "of each rank lie in host memory" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "8", "--layers", "400", "--hidden", "51200", "--heads", "4"], "12.6T parameters"),
        (["--gpus", "8", "--layers", "400", "--hidden", "51200", "--heads", "4"], "alone need about 887 GPUs"),
        (["--gpus", "1", "--layers", "48", "--hidden", "4096", "--heads", "32"], "let host memory be used (`offload`)"),
        (
            ["--gpus", "7", "--layers", "4", "--hidden", "64", "--heads", "4"],
            "GPUs that divides `global_batch`",
        ),
        (["--gpus", "8", "--layers", "4", "--hidden", "64", "--heads", "4", "--expert", "2"], "the model has none"),
        (["--gpus", "8", "--layers", "4", "--hidden", "9" * 20, "--heads", "9"], "is not planned for"),
        (["--gpus", "1", "--layers", "2", "--hidden", "64", "--heads", "4"], "on 1 A100-80, global batch 8 ("),
        (
            ["--gpus", "2", "--layers", "2", "--hidden", "64", "--heads", "4", "--micro-batch", "8"],
            "over 1 micro-batch",
        ),
    ],
)
def test_plan_speaks_as_people_do(arguments: list[str], said: str) -> None:
    limits = ["--pipeline", "2", "--schedule", "1f1b"] if "--micro-batch" in arguments else []
    assert said in _plan(*arguments, *limits, "--global-batch", "8")
