"""Published runs: what is read, what is never read, and how well they are predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_megatron.planner.model.constants import PRIORS, Constants
from lightning_megatron.planner.runs.records import family_scores, predict_rows, record, score_rows
from lightning_megatron.planner.runs.runs import MEASURED, read_rows, run_from_row
from lightning_megatron.planner.runs.scoring import kendall, ran_out_of_memory, summaries
from tools.calibrate import fit, folds, read_samples, score, table

RUNS = Path(__file__).parents[1] / "data" / "published_runs.csv"
OTHERS = RUNS.with_name("other_runs.csv")
ROW = {
    "id": "mine",
    "family": "test",
    "gpu": "A100-80",
    "precision": "fp16",
    "n_gpus": "64",
    "layers": "96",
    "hidden": "12288",
    "heads": "96",
    "vocab": "51200",
    "seq": "2048",
    "tp": "8",
    "pp": "8",
    "gbs": "64",
    "mbs": "1",
    "shard": "none",
    "recompute": "full",
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return read_rows(RUNS)


def test_measured_columns_cannot_change_a_prediction(rows: list[dict[str, str]]) -> None:
    rows = rows[::5]
    poisoned = [{**row, **dict.fromkeys(MEASURED, "17.0")} for row in rows]
    blank = [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]
    found = [record(item) for item in predict_rows(rows)]
    assert found == [record(item) for item in predict_rows(poisoned)] == [record(item) for item in predict_rows(blank)]


def test_every_published_run_is_predicted_and_fits(rows: list[dict[str, str]]) -> None:
    predicted = predict_rows(rows)
    assert [item.error for item in predicted if item.error] == []
    too_large = [item.id for item in predicted if item.prediction and not item.prediction.fits]
    assert too_large == []


def test_shipped_constants_predict_published_times(rows: list[dict[str, str]]) -> None:
    scores = {score.family: score for score in family_scores(score_rows(predict_rows(rows)))}
    overall = scores["all"]
    assert overall.median_error is not None and overall.median_error <= 10
    assert overall.correlation is not None and overall.correlation >= 0.8


def test_runs_that_no_fit_has_seen_are_predicted_as_well() -> None:
    rows = [row for row in read_rows(OTHERS) if row["family"] != "experts-fp8"]
    scores = {score.family: score for score in family_scores(score_rows(predict_rows(rows)))}
    assert scores["all"].rows == scores["all"].fitting_right + 1 == 30  # DeepSeek-V3 recomputes one projection more
    for found in scores.values():
        assert found.median_error is not None and found.median_error <= 12, found
        assert found.rows == 1 or (found.correlation is not None and found.correlation >= 0.8), found


def test_small_experts_in_8_bits_are_known_to_be_predicted_too_fast() -> None:
    """The page says by how much; what is predicted better some day should be said there too."""
    rows = [row for row in read_rows(OTHERS) if row["family"] == "experts-fp8"]
    (found, _) = family_scores(score_rows(predict_rows(rows)))
    assert found.bias is not None and -75 < found.bias < -40


@pytest.mark.wide
def test_a_family_left_out_is_predicted_by_the_others(rows: list[dict[str, str]]) -> None:
    samples = read_samples(rows)
    family = "selective-recompute"
    assert family in folds(samples)
    constants = fit([sample for sample in samples if sample.run.family != family], iterations=4)
    scores = summaries(score([sample for sample in samples if sample.run.family == family], constants))
    assert scores[0].median_error is not None and scores[0].median_error < 10
    assert scores[0].correlation == 1.0
    assert f"| {family} | 9 |" in table(scores)


def test_the_fit_explains_times_that_other_constants_made(rows: list[dict[str, str]]) -> None:
    truth = Constants(**PRIORS).with_values(gemm_ampere=0.78, nvlink=0.60)
    samples = [sample for sample in read_samples(rows) if sample.run.family.startswith("sc21")]
    predictions = [item.prediction for item in score(samples, truth)]
    made = [
        replace(sample, row={}, seconds=prediction.iteration_seconds)
        for sample, prediction in zip(samples, predictions, strict=True)
    ]
    found = fit(made, iterations=8)
    errors = [
        abs(item.prediction.iteration_seconds / sample.seconds - 1)
        for item, sample in zip(score(made, found), made, strict=True)
    ]
    assert max(errors) < 0.05
    assert found.gemm_ampere < PRIORS["gemm_ampere"] and found.nvlink < PRIORS["nvlink"]


def test_empty_cells_get_documented_defaults() -> None:
    row = {**ROW, "vocab": "", "mbs": "", "precision": "", "recompute": "", "gbs": "128"}
    run = run_from_row(row)
    assert (run.shape.vocab, run.recipe.micro_batch, run.recipe.precision) == (51200, 1, "bf16")
    assert run.recipe.data == 1
    assert any("vocabulary not given" in remark for remark in run.remarks)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"layers": ""}, "row 'mine': column `layers` is empty"),
        ({"hidden": "big"}, "`hidden=big` is not a number"),
        ({"heads": "-3"}, "`heads=-3` must be positive"),
        ({"tp": "1.5"}, "`tp=1.5` must be a whole number"),
        ({"n_gpus": "60"}, "`n_gpus=60` is not a multiple of tp x pp x cp = 64"),
        ({"gpu": "Z9000"}, "`gpu=Z9000` is not in the table"),
        ({"shard": "some"}, "`shard=some` is not known"),
        ({"recompute": "twice"}, "`recompute=twice` is not known"),
        ({"gbs": "1", "dp": "4"}, "`global_batch=1` is below"),
    ],
)
def test_unreadable_rows_say_which_cell(cells: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        run_from_row({**ROW, **cells})


def test_one_unreadable_row_leaves_the_others_predicted() -> None:
    found = predict_rows([ROW, {**ROW, "id": "broken", "layers": "x"}])
    assert found[0].prediction is not None
    assert found[1].error is not None and "broken" in found[1].error
    assert record(found[1]) == {"id": "broken", "error": found[1].error}


def test_an_unknown_gpu_with_a_peak_is_stood_in_for_at_that_peak() -> None:
    run = run_from_row({**ROW, "gpu": "Ampere(someone's)", "peak_tflops": "300"})
    assert run.cluster.gpu.peak_16 == 300e12
    assert any("taken as A100-80" in remark for remark in run.remarks)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("id,gpu\na,H100\n")
    with pytest.raises(ValueError, match=r"has no columns \['layers', 'hidden', 'heads', 'seq', 'gbs'\]"):
        read_rows(path)


@pytest.mark.parametrize(
    ("cells", "schedule", "chunks"),
    [
        ({}, "1f1b", 1),
        ({"vpp": "3"}, "interleaved", 3),
        ({"notes": "schedule=ZB-2p; 1.83 samples/s"}, "zb-h2", 1),
        ({"notes": "Interleaved 1F1B AsyncTP"}, "interleaved", 2),
        ({"notes": "paper text says interleaving on"}, "1f1b", 1),
        ({"schedule": "zb-v"}, "zb-v", 2),
        ({"vpp": "40"}, "1f1b", 1),
    ],
)
def test_the_schedule_is_read_where_a_row_names_it(cells: dict[str, str], schedule: str, chunks: int) -> None:
    recipe = run_from_row({**ROW, **cells}).recipe
    assert (recipe.schedule, recipe.chunks) == (schedule, chunks)


def test_tflops_come_in_the_rows_own_convention() -> None:
    def tflops(convention: str, **cells: str) -> float:
        return float(record(predict_rows([{**ROW, **cells, "flops_convention": convention}])[0])["tflops_per_gpu"])

    model, hardware = tflops("model"), tflops("SC21 eq.3 (hardware, full recompute)")
    assert hardware / model == pytest.approx(4 / 3, rel=0.01)
    assert tflops("hardware") == pytest.approx(hardware, rel=1e-9)
    assert tflops("hardware", recompute="none") == pytest.approx(tflops("model", recompute="none"))


def test_out_of_memory_rows_are_known_by_their_marks() -> None:
    assert ran_out_of_memory({"mem_gb": "OOM"})
    assert ran_out_of_memory({"notes": "02-25 OOM", "iter_s": ""})
    assert not ran_out_of_memory({"notes": "too close to OOM", "iter_s": "229.69"})


@pytest.mark.parametrize(
    ("layers", "heads", "tensor", "pipeline", "data", "micro_batch", "runs"),
    [
        (72, 64, 8, 1, 48, 1, False),
        (72, 64, 2, 6, 32, 1, False),
        (72, 64, 2, 6, 32, 2, False),
        (72, 64, 8, 2, 24, 2, True),
        (72, 64, 4, 6, 16, 4, True),
        (72, 64, 2, 12, 16, 2, True),
        (72, 64, 2, 24, 8, 2, True),
    ],
)
def test_layouts_of_a_181b_model_run_out_of_memory_where_they_really_did(
    layers: int, heads: int, tensor: int, pipeline: int, data: int, micro_batch: int, runs: bool
) -> None:
    """BigScience's log of trial layouts on 384 A100-80 (chronicles-prequel.md, 25 February 2022)."""
    row = {
        **ROW,
        "n_gpus": "384",
        "hidden": "14336",
        "vocab": "250880",
        "shard": "zero1",
        "gbs": "2016" if data in (24, 48) else "2048",
    }
    sizes = {"layers": layers, "heads": heads, "tp": tensor, "pp": pipeline, "dp": data, "mbs": micro_batch}
    found = predict_rows([{**row, **{name: str(value) for name, value in sizes.items()}}])[0]
    assert found.prediction is not None, found.error
    assert found.prediction.fits is runs


def test_kendall_counts_pairs_in_order() -> None:
    assert kendall([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert kendall([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert kendall([1.0], [2.0]) is None
