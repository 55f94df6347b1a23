"""The origin of a plan, and the style that it gives to each module."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_megatron.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from lightning_megatron.parallelize.plan.model_plans import own_plan
from lightning_megatron.parallelize.plan.patterns import expand
from lightning_megatron.parallelize.plan.styles import MEANINGS, Style, is_style, parse_style
from lightning_megatron.parallelize.reading.kinds import DROP_IN, is_attention, is_linear, is_table
from lightning_megatron.parallelize.reading.low_rank import splits_like_linear


def styles_of(module: nn.Module, plan: str | Mapping[str, str]) -> tuple[str, dict[str, Style]]:
    """The origin of the plan, and the style that it gives to each module.

    Raises:
        ValueError: ``plan`` is a string other than ``"auto"``, a pattern matches no module, or a style is unknown.
    """
    if not isinstance(plan, str):
        return "argument", _expanded(module, plan, strict=True)
    if plan != "auto":
        raise ValueError(f"`tensor_parallel_plan={plan!r}`: a plan is 'auto' or a dict of pattern -> style.")
    own = own_plan(module)
    if own:  # styles for layers that the user has replaced by modules of another kind are ignored
        parts, wanted = dict(module.named_modules()), _expanded(module, own, strict=False)
        return "hugging face", {name: style for name, style in wanted.items() if _takes(parts[name], style)}
    dropped_in = {name: _drop_in_style(m) for name, m in module.named_modules() if isinstance(m, DROP_IN)}
    if dropped_in:
        return "drop-in layers", dropped_in
    return "rules", {}


def _expanded(module: nn.Module, plan: Mapping[str, str], strict: bool) -> dict[str, Style]:
    names = list(dict(module.named_modules()))
    if strict:
        names += list(dict(module.named_parameters()))
    else:  # styles for experts and the like: those modules stay whole, which is correct
        plan = {pattern: style for pattern, style in plan.items() if is_style(style)}
    wanted = {pattern: parse_style(style, pattern) for pattern, style in plan.items()}
    if not strict:
        wanted = {p: s for p, s in wanted.items() if s is not Style.REPLICATE}
        known = {p for p in wanted if any(expand_one(p, names))}
        wanted = {p: s for p, s in wanted.items() if p in known}
    found = expand({p: s.value for p, s in wanted.items()}, names)
    return {name: wanted[pattern] for pattern, hits in found.items() for name in hits}


def expand_one(pattern: str, names: list[str]) -> list[str]:
    """Names that a pattern matches, possibly none."""
    try:
        return expand({pattern: ""}, names)[pattern]
    except ValueError:
        return []


def _drop_in_style(module: nn.Module) -> Style:
    if isinstance(module, ColumnParallelLinear):
        return Style.COLWISE_GATHER_OUTPUT if module.gather_output else Style.COLWISE
    if isinstance(module, RowParallelLinear):
        return Style.ROWWISE if module.input_is_parallel else Style.ROWWISE_SPLIT_INPUT
    return Style.EMBEDDING_ROWWISE if isinstance(module, VocabParallelEmbedding) else Style.HEADS


def check_styles(module: nn.Module, styles: Mapping[str, Style]) -> None:
    """Refuse styles for modules that cannot be split in that way.

    Raises:
        ValueError: a style does not fit its module; the message names the module and what the style needs.
    """
    parts = dict(module.named_modules())
    for name, style in styles.items():
        if name not in parts:
            raise ValueError(f"Plan entry {name!r} ({style.value}) names a parameter; plans here split modules.")
        if not _takes(parts[name], style):
            inside = [f"{name}.{n}" for n, m in parts[name].named_modules() if n and is_linear(m)][:3]
            hint = f"; it holds {', '.join(inside)}" if inside else ""
            raise ValueError(
                f"{name!r} is a {_kind(parts[name])} and cannot be {style.value!r} ({MEANINGS[style]}): that needs "
                f"{_needs(style)}{hint}."
            )


def _takes(module: nn.Module, style: Style) -> bool:
    """Whether a module can be split in this style."""
    if _is_linear_style(style):
        return splits_like_linear(module)
    if style is Style.EMBEDDING_ROWWISE:
        return is_table(module)
    return style is not Style.HEADS or is_attention(module)


def _needs(style: Style) -> str:
    if _is_linear_style(style):
        return "a linear layer"
    return "torch.nn.Embedding" if style is Style.EMBEDDING_ROWWISE else "torch.nn.MultiheadAttention"


def _is_linear_style(style: Style) -> bool:
    return style.is_column or style.is_row or style is Style.MLA_KV_A_PROJ


def _kind(module: nn.Module) -> str:
    """The name of a module's class, with its Python module if torch has a class of the same name."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__name__}" if hasattr(nn, kind.__name__) else kind.__name__
