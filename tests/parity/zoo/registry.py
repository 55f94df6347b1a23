"""Every module of the zoo by name, with the tolerance its own arithmetic allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch import LightningModule

from tests.parity.zoo import (
    foreign,
    hazards,
    huggingface,
    huggingface_more,
    kept,
    language,
    loops,
    strangers,
    tasks,
    vision,
    whole,
)

STRICT = 1e-9
# A Hugging Face model that is given labels= computes its loss in float32: one unit in the last place is 2e-7 here,
# measured differences are up to 7e-7. Their gradients, and so their weights, still agree to 1e-14.
FLOAT32_LOSS = 2e-6
# These compute norms (Gemma, Cohere) or the state (Mamba) in float32: weights differ by up to 9e-9 after six steps.
FLOAT32_INSIDE = ("gemma", "cohere", "mamba")
FLOAT32_WEIGHTS = 1e-7
# DeBERTa's attention scores pass through float32.
FLOAT32 = 1e-5


@dataclass(frozen=True)
class Specimen:
    """One module.

    Attributes:
        build: makes it; called after seeding, so that every process makes the same.
        tolerance: absolute and relative, on losses and metrics.
        weight_tolerance: the same on weights.
    """

    build: Callable[[], LightningModule]
    tolerance: float = STRICT
    weight_tolerance: float = STRICT


def _task(task: type[tasks.Task], net: Callable[[], torch.nn.Module]) -> LightningModule:
    return task(net())


_PLAIN: dict[str, Callable[[], LightningModule]] = {
    "nanogpt": partial(_task, tasks.OwnLossTask, language.NanoGPT),
    "keyword_hidden": partial(_task, tasks.MaskedTask, language.KeywordHidden),
    "sequential_trunk": partial(_task, tasks.TokenTask, language.SequentialTrunk),
    "one_sequential": partial(_task, tasks.TokenTask, language.OneSequential),
    "torch_layers": partial(_task, tasks.MaskedTask, language.TorchLayers),
    "torch_encoder": partial(_task, tasks.TokenTask, language.TorchEncoder),
    "tuple_layers": partial(_task, tasks.TokenTask, language.TupleLayers),
    "recurrent": partial(_task, tasks.TokenTask, language.Recurrent),
    "learned_positions": partial(_task, tasks.TokenTask, language.LearnedPositions),
    "parallel_lists": partial(_task, tasks.TokenTask, language.ParallelLists),
    "outside_residual": partial(_task, tasks.TokenTask, partial(language.ParallelLists, outside=True)),
    "reduced": partial(_task, tasks.TokenTask, loops.Walker),
    "indexed": partial(_task, tasks.TokenTask, loops.Indexed),
    "scaled": partial(_task, tasks.TokenTask, loops.Scaled),
    "sequence_first": partial(_task, tasks.TokenTask, loops.SequenceFirst),
    "dictionary": partial(_task, tasks.TokenTask, loops.Dictionary),
    "encoder_decoder": partial(_task, tasks.TokenTask, loops.EncoderDecoder),
    "dense_skips": partial(_task, tasks.TokenTask, loops.DenseSkips),
    "auxiliary_loss": partial(_task, hazards.AuxiliaryTask, hazards.AuxiliaryLoss),
    "auxiliary_kept": partial(_task, hazards.AuxiliaryTask, partial(hazards.AuxiliaryLoss, kept=True)),
    "weight_penalty": hazards.WeightPenalty,
    "deep_supervision": partial(_task, tasks.TokenTask, hazards.DeepSupervision),
    "towers": partial(_task, tasks.TokenTask, hazards.Towers),
    "reentrant": partial(_task, tasks.TokenTask, hazards.Reentrant),
    "per_layer_masks": partial(_task, tasks.TokenTask, hazards.PerLayerMasks),
    "extra_tensors": hazards.ExtraTensors,
    "pairs": partial(_task, tasks.TokenTask, foreign.Pairs),
    "two_lists": partial(_task, tasks.TokenTask, foreign.TwoLists),
    "own_stack": partial(_task, tasks.TokenTask, foreign.OwnStack),
    "shared_norm": partial(_task, tasks.TokenTask, foreign.SharedNorm),
    "tuple_sequential": partial(_task, tasks.TokenTask, foreign.TupleSequential),
    "dict_state": partial(_task, tasks.TokenTask, foreign.DictState),
    "embedding_twice": partial(_task, tasks.TokenTask, foreign.EmbeddingTwice),
    "stages": partial(_task, tasks.ImageTask, foreign.Stages),
    "shared_table": partial(_task, tasks.TokenTask, strangers.SharedTable),
    "asked_first": partial(_task, tasks.TokenTask, strangers.AskedFirst),
    "conditioned": partial(_task, tasks.TokenTask, strangers.Conditioned),
    "embedding_skip": partial(_task, tasks.TokenTask, strangers.EmbeddingSkip),
    "cut_between": partial(_task, tasks.TokenTask, strangers.CutBetween),
    "embedding_mask": partial(_task, tasks.TokenTask, strangers.EmbeddingMask),
    "distilled": partial(_task, tasks.TokenTask, strangers.Distilled),
    "relative_bias": partial(_task, tasks.TokenTask, language.RelativeBias),
    "checkpointed": partial(_task, tasks.TokenTask, language.Checkpointed),
    "two_heads": partial(_task, tasks.NestedTask, language.TwoHeads),
    "vision_transformer": partial(_task, tasks.ImageTask, vision.VisionTransformer),
    "convolutions": partial(_task, tasks.ImageTask, vision.ResidualConvolutions),
    "perceptron": partial(_task, tasks.TensorTask, vision.Perceptron),
    "flat_module": whole.FlatModule,
    "plateau": whole.Plateau,
    "one_optimizer": whole.OneOptimizer,
    "end_groups": whole.EndGroups,
    "fused": whole.Fused,
}
# What layers leave behind besides their output; their everyday rows are chosen by hand.
_KEPT: dict[str, Callable[[], LightningModule]] = {
    "kept_in_layers": kept.KeptInLayers,
    "kept_in_registry": kept.KeptInRegistry,
    "kept_in_argument": kept.KeptInArgument,
    "kept_sums": kept.KeptSums,
    "hooked": kept.Hooked,
    "shortened": kept.Shortened,
}


def _pretrained() -> dict[str, Specimen]:
    """Each Hugging Face model with its own loss, and every third one with the step's loss instead."""
    found = {}
    for index, name in enumerate(huggingface.CONFIGS):
        inside = FLOAT32_WEIGHTS if name.startswith(FLOAT32_INSIDE) else STRICT
        build = partial(huggingface.PretrainedTask, name, labels=True, encoded=index % 4 == 1)
        found[f"hf_{name}"] = Specimen(build, FLOAT32_LOSS, inside)
        if index % 3 == 0 and name != "t5":
            found[f"hf_{name}_logits"] = Specimen(
                partial(huggingface.PretrainedTask, name, labels=False), inside, inside
            )
    for name in ("llama", "gpt2", "opt"):
        build = partial(huggingface.PretrainedTask, name, labels=True, recompute=True)
        found[f"hf_{name}_recomputed"] = Specimen(build, FLOAT32_LOSS)
    for name in huggingface_more.CLASSIFIERS:
        tolerance = FLOAT32 if name.startswith("deberta") else STRICT
        found[f"hf_{name}"] = Specimen(partial(huggingface_more.Classifier, name), tolerance, tolerance)
    return found


# Values besides the hidden state cross the cut with a gradient, or layers run in another order than they are listed:
# under a pipeline these are refused, with an error that matches this, and every other module trains.
_OF_ANOTHER_STAGE = r"(an argument of layer .*|the (logged value `val_)?loss`?) depends on `net\.\S+, which another"
REFUSED_CUT = {
    "outside_residual": _OF_ANOTHER_STAGE,
    "dense_skips": _OF_ANOTHER_STAGE,
    "indexed": "a layer was left out in one step",
    "weight_penalty": "the step read all parameters of `WeightPenalty`",
    "deep_supervision": r"the (logged value `val_loss`|loss) depends on `net\.blocks\.\d`, which another pipeline",
    "reentrant": r"the loss depends on `net\.blocks\.\d`, which another pipeline stage owns",
}
# Over tensor ranks these are refused, and every other module trains.
REFUSED_SPLIT = {
    **dict.fromkeys(("recurrent", "stages", "asked_first", "convolutions", "hf_mamba"), "No tensor-parallel plan"),
}
# Over context ranks these are, and every other module trains.
REFUSED_TOKENS = {
    "reentrant": r"use_reentrant=False",
    **dict.fromkeys(("stages", "convolutions"), r"\[batch, tokens, features\]|repeated layers"),
    "hooked": "would be given the gradient of this rank",
}
ZOO: dict[str, Specimen] = {
    **{name: Specimen(build) for name, build in (_PLAIN | _KEPT).items()},
    **_pretrained(),
}
KEPT = tuple(_KEPT)


def build(name: str, seed: int = 7) -> LightningModule:
    """The module called ``name``, from ``seed``."""
    torch.manual_seed(seed)
    return ZOO[name].build()
