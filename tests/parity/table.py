"""Which rows the parity table has: a covering subset for every run, an exhaustive table on request.

Five things vary beside the module. The covering subset meets every *pair* of their values at least once, each plain
module, and one Hugging Face model of each build. Once every pair has been met, rows are those of two and three stages:
four ranks cost twice as much as two, and every module meets every layout in the exhaustive table.

The exhaustive table shows each module in each layout and under each schedule, and one module in every *three* values of
the five. It leaves out what these show already: a module in one layout under both GPipe and 1F1B, which run the same
segments in two orders (it meets both orders, in different layouts), and schedules where there is a single stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from tests.parity.covering import covering_rows
from tests.parity.row import CLIPS, Row
from tests.parity.zoo.registry import KEPT, ZOO

SCHEDULES = ("1f1b", "gpipe")
ACCUMULATE = (1, 2)
MICRO_BATCHES = (2, 1, 3, 0)
MAIN_LAYOUTS = ("pp2", "pp3", "pp4", "pp2xdp2", "dp2")
CONTEXT_LAYOUTS = ("cp2", "cp3", "dp2xcp2", "pp2xcp2", "cp2xtp2")
TENSOR_LAYOUTS = ("tp2", "pp2xtp2", "dp2xtp2")
FURTHER_SCHEDULES = ("interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
FACTORS = (MAIN_LAYOUTS, SCHEDULES, tuple(CLIPS), ACCUMULATE, MICRO_BATCHES)
SMALL_FACTORS = (("pp2", "pp3"), *FACTORS[1:])
# One of each build: rotary, tied, alibi, learned positions, two norms, parallel attention, experts, state space, ...
PRETRAINED = (
    *(
        "llama_logits",
        "llama_recomputed",
        "qwen2",
        "mistral",
        "gemma3",
        "phi",
        "gpt2",
        "gptj",
        "gpt_neox",
        "opt",
        "bloom",
    ),
    *("falcon_alibi", "mpt", "biogpt", "mixtral", "mamba", "bert", "t5"),
    *("bert_classifier", "distilbert_classifier", "vit_classifier"),
)
Setting = tuple[str, str, str, int, int]


def covering(factors: tuple[tuple[object, ...], ...] = FACTORS) -> list[Setting]:
    """A short list of settings in which every two values of every two factors meet; greedy, the same every time."""
    settings = list(itertools.product(*factors))
    missing = {pair for setting in settings for pair in _pairs(setting)}
    chosen: list[Setting] = []
    while missing:
        best = max(settings, key=lambda setting: len(missing & _pairs(setting)))
        chosen.append(best)  # type: ignore[arg-type]
        missing -= _pairs(best)
    return chosen


def _pairs(setting: tuple[object, ...]) -> set[tuple[tuple[int, object], ...]]:
    return set(itertools.combinations(enumerate(setting), 2))


def _row(module: str, setting: Setting) -> Row:
    layout, schedule, clip, accumulate, micro_batch = setting
    return Row(module, layout, schedule, clip, accumulate, micro_batch)


def everyday() -> list[Row]:
    """Rows of an ordinary test run.

    A module of one's own under the further schedules is in test_schedules.py, over tensor ranks in test_tensor.py.
    """
    settings = itertools.chain(covering(), itertools.cycle(covering(SMALL_FACTORS)))
    plain = [name for name in ZOO if not name.startswith("hf_") and name not in KEPT]
    names = [*plain, *(f"hf_{name}" for name in PRETRAINED)]
    turns = [  # both ends of the model are on one stage; a value goes from piece to piece there as it came
        Row("distilled", "pp2", "dualpipe-v", "none", 2, 1),
        Row("conditioned", "pp2", "zb-v", "none", 1, 2),
        Row("kept_in_layers", "pp3", "1f1b", "none", 1, 2),
        Row("kept_in_registry", "pp2", "interleaved", "none", 1, 2),
        Row("kept_in_argument", "pp2xdp2", "1f1b", "norm", 1, 2),
        Row("kept_sums", "pp2", "zb-v", "none", 1, 2),
        Row("hooked", "pp2", "zb-v", "none", 1, 2),
        Row("shortened", "pp2", "1f1b", "none", 1, 2),
    ]
    tokens = [
        Row("nanogpt", "cp3", "1f1b", "norm", 2, 0),
        Row("torch_encoder", "dp2xcp2", "1f1b", "none", 1, 0),
        Row("hf_llama", "cp2", "1f1b", "value", 1, 0),
        Row("nanogpt", "pp2xcp2", "1f1b", "norm", 2, 2),
        Row("hf_gpt2", "cp2xtp2xsp", "1f1b", "norm", 1, 0),
    ]
    return [*(_row(name, next(settings)) for name in names), *further(("hf_llama",)), *turns, *tokens]


def further(modules: Iterable[str]) -> Iterator[Row]:
    """Each module with every further schedule (two pieces per stage where it has them) and split over tensor ranks."""
    cycle = itertools.cycle(itertools.product(CLIPS, ACCUMULATE, MICRO_BATCHES))
    for module in modules:
        for schedule in FURTHER_SCHEDULES:
            clip, accumulate, _ = next(cycle)
            yield Row(module, "pp2", schedule, clip, accumulate, micro_batch=1 if schedule == "dualpipe-v" else 2)
        for layout in TENSOR_LAYOUTS:
            yield _row(module, (layout, "1f1b", *next(cycle)))


def everything() -> Iterator[Row]:
    """Every module in every layout and with both schedules, and one module in any three values of the settings."""
    cycle = itertools.cycle(itertools.product(CLIPS, ACCUMULATE, MICRO_BATCHES))
    for (turn, module), (at, layout) in itertools.product(enumerate(ZOO), enumerate(MAIN_LAYOUTS)):
        rows = [_row(module, (layout, schedule, *next(cycle))) for schedule in SCHEDULES]
        yield rows[0 if layout == "dp2" else (turn // 2 + at) % len(SCHEDULES)]
    yield from further(ZOO)
    for module, layout in itertools.product(ZOO, CONTEXT_LAYOUTS):
        clip, accumulate, _ = next(cycle)
        yield Row(module, layout, "1f1b", clip, accumulate, micro_batch=2 if layout.startswith("pp") else 0)
    modules = ("nanogpt", "torch_encoder", "hf_llama")
    for turn, schedule in enumerate((*SCHEDULES, *FURTHER_SCHEDULES)):
        both = (*((module, "pp2xcp2") for module in modules), (modules[turn % len(modules)], "pp2xcp3"))
        for module, layout in both:
            yield Row(module, layout, schedule, "norm", 1, micro_batch=1 if schedule == "dualpipe-v" else 2)
    yield Row("nanogpt", "pp3xcp2", "1f1b", "norm", 2, 2)
    for layout in ("pp2xdp2xcp2", "cp3xtp2", "pp2xcp2xtp2"):
        yield Row("nanogpt", layout, "1f1b", "norm", 2, 2)
    for module, layout in itertools.product(("nanogpt", "hf_llama", "hf_gpt2"), ("cp2xtp2xsp", "cp3xtp2xsp")):
        yield Row(module, layout, "1f1b", "value", 2, 0)
    for schedule in ("1f1b", "interleaved", "zb-h1", "zb-v"):
        yield Row("hf_llama", "pp2xcp2xtp2xsp", schedule, "norm", 2, 2)
    for setting in covering_rows(FACTORS, 3):
        yield _row("nanogpt", setting)  # type: ignore[arg-type]
