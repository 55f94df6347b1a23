"""Finds the trunk: the run of repeated layers at which a module is cut into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from torch import nn

from lightning_megatron.mesh.marks import Marks

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Trunk:
    """The layers that the pipeline distributes, in the order they run.

    Attributes:
        name: dotted name of the container.
        layer_names: dotted names of its layers.
    """

    name: str
    layer_names: tuple[str, ...]

    def layers(self, module: nn.Module) -> list[nn.Module]:
        """The layer objects inside ``module``."""
        return [module.get_submodule(name) for name in self.layer_names]


@dataclass(frozen=True)
class LayersHere:
    """The layers of a module that this rank runs.

    Attributes:
        module: the whole module.
        name: dotted name of the trunk, or ``"auto"``; only used if the module is not cut.
        cut: the trunk of a module that is cut.
        owned: names of the layers on this stage; all of the trunk's if the module is not cut.
    """

    module: nn.Module
    name: str = "auto"
    cut: Trunk | None = None
    owned: tuple[str, ...] = ()

    @property
    def trunk(self) -> Trunk:
        """The trunk; it is looked for when it is asked for, so that a module without one does not fail before.

        Raises:
            ValueError: there is none.
        """
        return find_trunk(self.module, self.name) if self.cut is None else self.cut

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers on this rank, in their order."""
        return self.trunk.layer_names if self.cut is None else self.owned


def holders_of(container: nn.Module, root: nn.Module) -> list[nn.Module]:
    """``root``, and every module in it that ``container`` is in, under whichever name."""
    inside = [module for module in root.modules() if any(child is container for child in module.modules())]
    return [root, *(module for module in inside if module is not container and module is not root)]


def find_trunk(module: nn.Module, name: str = "auto", instead: str = "pipeline_parallel_size=1") -> Trunk:
    """Find the trunk of ``module``: its largest container of repeated layers.

    Containers are ``nn.ModuleList``, ``nn.Sequential`` and ``nn.ModuleDict``. Layers with submodules are preferred to
    layers without, whatever their size.

    Args:
        module: the whole module, real or on the meta device.
        name: dotted name of the container, or ``"auto"``.
        instead: setting that needs no trunk.

    Raises:
        ValueError: no container qualifies, the named one does not, or it holds one layer twice; the message lists the
            containers of the module.
    """
    if name != "auto":
        return _named_trunk(module, name, instead)
    noted = Marks.of(module).get(Trunk)
    if noted is not None and {*noted.layer_names} <= {name for name, _ in module.named_modules(remove_duplicate=False)}:
        return noted
    candidates = list(_candidates(module))
    if not candidates:
        raise ValueError(
            "no trunk found: the module has no nn.ModuleList or nn.Sequential of at least two layers of one class "
            f"with parameters. {_list_containers(module)} Put the repeated layers into an nn.ModuleList, name a "
            f'container with `pipeline_layers="..."`, or use `{instead}`.'
        )
    best = max(candidates, key=lambda candidate: candidate[:3])
    return _trunk(best[3], module.get_submodule(best[3]), instead)


def note_trunk(module: nn.Module) -> None:
    """Find the trunk while the module is whole: a rank has fewer weights of layers that are split than of others, such
    as those of a teacher, which are not.
    """
    with suppress(ValueError):  # of a module that need not have one
        Marks.of(module).put(find_trunk(module))


def _named_trunk(module: nn.Module, name: str, instead: str) -> Trunk:
    try:
        container = module.get_submodule(name)
    except AttributeError:
        raise ValueError(f"`pipeline_layers={name!r}` names no submodule. {_list_containers(module)}") from None
    if not isinstance(container, _CONTAINERS) or len(container) < 1:
        raise ValueError(
            f"`pipeline_layers={name!r}` is a {type(container).__name__}, not an nn.ModuleList, nn.Sequential or "
            f"nn.ModuleDict of layers. {_list_containers(module)}"
        )
    return _trunk(name, container, instead)


def _trunk(name: str, container: nn.Module, instead: str) -> Trunk:
    layers = list(container._modules.values())
    repeated = [child for child, count in Counter(map(id, layers)).items() if count > 1]
    if repeated:
        raise ValueError(
            f"the trunk `{name}` holds the same layer object more than once; shared layers cannot be cut. Use one "
            f"object per layer (their parameters may be tied) or `{instead}`."
        )
    return Trunk(name, tuple(f"{name}.{child}" if name else child for child in container._modules))


def _candidates(module: nn.Module) -> Iterator[tuple[bool, int, bool, str]]:
    """Yield ``(has composite layers, parameters in repeated layers, is trained, name)`` of every container of repeated
    layers.
    """
    for name, container in module.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        layers = list(container._modules.values())
        sizes = [(type(layer), sum(p.numel() for p in layer.parameters())) for layer in layers if layer is not None]
        classes = Counter(kind for kind, size in sizes if size)
        alone = 1 if isinstance(container, nn.ModuleList) and len(layers) == 1 else 2
        repeated = {kind for kind, count in classes.items() if count >= alone}
        if not repeated:
            continue
        total = sum(size for kind, size in sizes if kind in repeated)
        composite = any(
            type(layer) in repeated and any(True for _ in layer.children()) for layer in container.children()
        )
        trained = any(parameter.requires_grad for parameter in container.parameters())
        yield composite, total, trained, name


def _list_containers(module: nn.Module) -> str:
    found = [
        f"`{name}` ({type(child).__name__} of {len(child)})"
        for name, child in module.named_modules()
        if isinstance(child, _CONTAINERS) and len(child)
    ]
    return f"Containers in the module: {', '.join(found)}." if found else "The module has no such container."
