"""Embeddings with ``max_norm`` over replicas.

Such a table is written in its own forward: rows that are looked up are shortened to the norm first. One process
shortens the rows of the whole batch; a replica would shorten those of its part, and the replicas' tables would drift
apart. So rows are noted as they are looked up, and shortened on all replicas after the backward. To shorten a row
twice changes nothing, and no other row, and no gradient, depends on it::

    replica 0    looks up rows 1, 2   ──▶ shortens 1, 2   ┐ rows of all:    ┐ shortens 1, 2, 5
    replica 1    looks up rows 2, 5   ──▶ shortens 2, 5   ┘ one all-reduce  ┘ shortens 1, 2, 5

That holds as long as nobody but the lookup reads the table in between. A head that shares its weight does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.mesh.messages.collectives import raw_all_reduce

_TABLES = (nn.Embedding, nn.EmbeddingBag)


class RenormalisedRows:
    """Shortens rows on all ranks that one of them has looked up.

    Args:
        module: the module, with the part of it that is here.
        group: of ranks that have other samples, or other tokens.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        tables: list[Any] = [child for _, child in _tables(module) if child._parameters.get("weight") is not None]
        self._tables = tables if group.size() > 1 else []
        self._looked_up = dict[int, Tensor]()
        self._hooks = [table.register_forward_pre_hook(self._note, with_kwargs=True) for table in self._tables]

    def _note(self, table: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows: Tensor = args[0] if args else kwargs["input"]
        weight: Tensor = table.weight
        if rows.is_meta or weight.is_meta or type(rows) is not Tensor:
            return
        if id(table) not in self._looked_up:
            self._looked_up[id(table)] = _no_rows(weight)
        self._looked_up[id(table)][rows.detach().flatten().long()] = 1

    def share(self) -> None:
        """Shorten what any rank has looked up since the last call; collective over the group."""
        for table in self._tables:
            weight: Any = table.weight
            seen = self._looked_up.pop(id(table), None)
            seen = _no_rows(weight) if seen is None else seen
            rows = raw_all_reduce(seen, self._group, maximum=True).nonzero().flatten()
            with torch.no_grad():
                torch.embedding_renorm_(weight.detach(), rows, table.max_norm, table.norm_type)

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._tables = [], []


def _no_rows(weight: Tensor) -> Tensor:
    """A mark for each row, none of them set, uint8 [rows]."""
    return torch.zeros(len(weight), dtype=torch.uint8, device=weight.device)


def check_renormalised(module: nn.Module, ranks: int, *, weight_sharding: bool) -> None:
    """Refuse tables that others read than the lookup, where ranks share the work.

    Args:
        module: the whole module.
        ranks: how many there are.
        weight_sharding: whether weights are gathered for a step.

    Raises:
        ValueError: naming the table and the other module.
    """
    tables = [*_tables(module)] if ranks > 1 else []
    for name, table in tables:
        if weight_sharding:
            raise ValueError(
                f"`{name}` shortens rows of its weight in its forward (`max_norm={table.max_norm}`), and with "
                "`weight_sharding` that weight is a copy, which is given back. Leave `weight_sharding` out, or shorten "
                "all rows after each step: no `max_norm`, and in `on_train_batch_end` "
                f"`self.{name}.weight.data.renorm_(2, 0, {table.max_norm})`."
            )
        weight = table.weight
        others = [
            n for n, p in module.named_parameters(remove_duplicate=False) if p is weight and n != f"{name}.weight"
        ]
        if others:
            raise ValueError(
                f"`{name}` shortens the rows that it looks up in its forward (`max_norm={table.max_norm}`), and "
                f"`{others[0]}` is the same weight, of which other ranks then read other rows than one process. Give "
                "them weights of their own, or shorten all rows after each step: no `max_norm`, and in "
                f"`on_train_batch_end` `self.{name}.weight.data.renorm_(2, 0, {table.max_norm})`."
            )


def renormalises(module: nn.Module) -> bool:
    """Whether a module is such an embedding."""
    return isinstance(module, _TABLES) and module.max_norm is not None


def renormalised(module: nn.Module) -> Iterator[Tensor]:
    """The weights of such embeddings that are here."""
    each = (table._parameters.get("weight") for _, table in _tables(module))
    return (weight for weight in each if weight is not None)


def _tables(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from ((name, child) for name, child in module.named_modules() if renormalises(child))
