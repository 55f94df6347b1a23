"""Which rows the parity table has: a covering subset for every run, an exhaustive table on request.

Five things vary beside the module. The covering subset meets every *pair* of their values at least once, and every
eighth of the other modules, plain ones and those of Hugging Face. Once every pair has been met, rows are those of two
and three stages: four ranks cost twice as much as two, and modules meet all kinds of layout in the exhaustive table.

The exhaustive table shows each module in two of three kinds of layout and under two of three kinds of schedule (those
of Hugging Face in one and under one; another form of a module, with logits, recomputed or as a classifier, in no layout
of its own), and one module in every *three* values of the five. Kinds of layout: stages alone; context ranks without
stages; replicas or context ranks beside tensor ranks. Beside stages of a schedule are replicas, tensor ranks or context
ranks. Modules leave out a kind in turn, and of the layouts and schedules of one kind they take one in turn, which
differ in their numbers, or in the order of the same segments.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tests.parity.covering import covering_rows
from tests.parity.row import CLIPS, Row
from tests.parity.zoo.registry import KEPT, ZOO

SCHEDULES = ("1f1b", "gpipe")
ACCUMULATE = (1, 2)
MICRO_BATCHES = (2, 1, 3, 0)
MAIN_LAYOUTS = ("pp2", "pp3", "pp4", "pp2xdp2", "dp2")
STAGES = ("pp3", "pp4")
TWO_STAGES = ("pp2xdp2", "pp2xtp2", "pp2xcp2")
LAYOUTS_OF_ONE_SCHEDULE = (STAGES, ("cp3", "dp2xcp2"), ("dp2xtp2", "cp2xtp2"))  # of each, modules take one in turn
FURTHER_SCHEDULES = ("interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
KINDS_OF_SCHEDULE = (("interleaved",), ("zb-h1", "zb-h2"), ("zb-v", "dualpipe-v"))
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
    names = [*names[: len(covering())], *names[len(covering()) :: 16]]
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
    tensor = [Row("hf_llama", layout, "1f1b", "norm", 2, 2) for layout in ("tp2", "pp2xtp2")]
    cycle = itertools.cycle(itertools.product(CLIPS, ACCUMULATE, (2,)))
    schedules = further("hf_llama", FURTHER_SCHEDULES, ("pp2",), cycle)
    return [*(_row(name, next(settings)) for name in names), *schedules, *turns, *tokens, *tensor]


def further(
    module: str, schedules: Sequence[str], layouts: Sequence[str], cycle: Iterator[tuple[str, int, int]]
) -> Iterator[Row]:
    """A module under further schedules, in these layouts of two stages in turn; two pieces per stage."""
    for schedule, layout in zip(schedules, itertools.cycle(layouts)):
        clip, accumulate, _ = next(cycle)
        yield Row(module, layout, schedule, clip, accumulate, micro_batch=1 if schedule == "dualpipe-v" else 2)


def is_another_form(module: str) -> bool:
    """Whether the table has the same model as it comes, and this is what else a user does with it."""
    name, _, form = module.rpartition("_")
    return name in ZOO and form in ("logits", "recomputed", "classifier")


def _in_turn(kinds: Sequence[tuple[str, ...]], turn: int, count: int) -> list[tuple[str, ...]]:
    return [kinds[(turn + 1 + place) % len(kinds)] for place in range(count)]


def kinds_of_schedule(module: str) -> int:
    """How many of them the table has a module under."""
    return _kinds(module, KINDS_OF_SCHEDULE)


def kinds_of_layout(module: str) -> int:
    """How many of them the table has a module in, without another schedule."""
    return 0 if is_another_form(module) else _kinds(module, LAYOUTS_OF_ONE_SCHEDULE)


def _kinds(module: str, kinds: Sequence[tuple[str, ...]]) -> int:
    return 1 if module.startswith("hf_") else len(kinds) - 1


def everything() -> Iterator[Row]:
    """Every module in two kinds of layouts and of schedules, and one module in any three values of the settings."""
    cycle = itertools.cycle(itertools.product(CLIPS, ACCUMULATE, MICRO_BATCHES))
    for turn, module in enumerate(ZOO):
        for layouts in _in_turn(LAYOUTS_OF_ONE_SCHEDULE, turn, kinds_of_layout(module)):
            layout = layouts[turn % len(layouts)]
            schedule = SCHEDULES[turn // len(STAGES) % len(SCHEDULES)] if layout in STAGES else "1f1b"
            clip, accumulate, micro_batch = next(cycle)
            yield Row(module, layout, schedule, clip, accumulate, 0 if "cp" in layout else micro_batch)
        first = turn % len(TWO_STAGES)
        round_ = turn // len(TWO_STAGES)
        kinds = _in_turn(KINDS_OF_SCHEDULE, round_, kinds_of_schedule(module))
        schedules = [kind[turn % len(kind)] for kind in kinds]
        yield from further(module, schedules, TWO_STAGES[first:] + TWO_STAGES[:first], cycle)
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
