"""Replicas hold the same weights before a step, unless code of the user's has written others into some of them.

A hook or step that writes a number of its own batch into a weight (``self.scale.fill_(worst)``), or on the first rank
only, gives each replica another model, whose gradients would go on being averaged with the others'. One process has one
weight. So the sums of all weights are compared before the first steps and their backwards, in the first steps of the
first epochs, and then in steps and epochs 8, 64, 512, ..., as code may write late. Where replicas share the optimizer's
work, an update makes their weights alike again: each is then that of one of them.

The same holds for stages of a pipeline that have the same weight (a tied embedding, a layer used twice): of the code
after the layers, only the last stage runs. Their sums are compared after the backwards of those steps; and of every
step where ``.data`` occurs in code that it may reach, which leaves no trace that a stage could look for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.data_parallel.renormalised_rows import renormalised
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import extremes_over
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.lightning.hooks import writes_unseen
from lightning_megatron.strategy.processes import Processes
from lightning_megatron.strategy.recheck import is_due

_APART = 1e-7  # of the sum of magnitudes; far above what sums in another order differ by
_APART_STAGES = 1e-6  # each of which updates its own


class WeightSums:
    """Sums of weights, compared over some ranks.

    Args:
        gradients: knows which weights are spread over replicas.
        processes: of the strategy.
        axis: of the ranks.
        share: of the sum of a weight's magnitudes by which its sums may differ.
    """

    def __init__(self, gradients: ModelGradients, processes: Processes, axis: str, share: float) -> None:
        self._gradients, self._device, self._share = gradients, processes.device, share
        self._group, self._compares = processes.mesh.group(axis), processes.world.compares

    def is_whole(self, parameter: nn.Parameter) -> bool:
        """Whether all of a weight is here now."""
        windows = self._gradients.windows
        return not parameter.is_meta and (windows is None or windows.spread_place(parameter) is None)

    def apart(self, weights: Mapping[str, Tensor | None]) -> Iterator[tuple[str, float, float]]:
        """Name, lowest and highest sum of the weights that differ; collective over the ranks, with the same names.

        Args:
            weights: ``None`` for those that this rank does not have.
        """
        if not weights:
            return
        nothing = torch.full((2,), torch.nan, dtype=torch.float64, device=self._device)
        sums = [nothing if each is None else _sums(each).to(self._device) for each in weights.values()]
        lowest, highest = extremes_over(torch.stack(sums), self._group)
        if not self._compares:
            return
        differ = (highest[:, 0] - lowest[:, 0] > self._share * highest[:, 1]).tolist()
        for index in [at for at, differs in enumerate(differ) if differs]:
            yield list(weights)[index], float(lowest[index, 0]), float(highest[index, 0])


class EqualReplicas:
    """Compares the weights of the replicas of one stage.

    Args:
        module: this rank's part of the user's module.
        gradients: of it; knows whose weights experts are.
        processes: of the strategy.
    """

    def __init__(self, module: nn.Module, gradients: ModelGradients, processes: Processes) -> None:
        self._module, self._gradients = module, gradients
        self._sums = WeightSums(gradients, processes, "data_parallel", _APART)
        self._steps, self._epoch, self._again = 0, -1, False

    def check(self, epoch: int) -> None:
        """Compare, if it is the turn of this step; collective over the replicas.

        Args:
            epoch: the present one.

        Raises:
            RuntimeError: a weight differs, on every replica of this stage.
        """
        turn = is_due(self._steps, first=4) or (epoch != self._epoch and is_due(epoch, first=4))
        self._steps, self._epoch = self._steps + 1, epoch
        if turn:
            self._compare()
        self._again = turn

    def check_again(self) -> None:
        """Compare before the first backward of a step whose turn it is, as the step may have written."""
        if self._again:
            self._again = False
            self._compare(in_step=True)

    @torch.no_grad()
    def _compare(self, *, in_step: bool = False) -> None:
        self._gradients.finish_gather(spread=False)
        listed = type(self._module).named_parameters(self._module)
        shortened = {id(p) for p in renormalised(self._module)} if in_step else ()  # after the backward, on all
        named = {name: p for name, p in listed if id(p) not in shortened and self._is_common(name, p)}
        for name, lowest, highest in self._sums.apart(named):
            raise RuntimeError(
                f"`{name}` differs between the replicas, of which each has written its own value into it: "
                f"its elements add up to {lowest!r} on one and {highest!r} on another. In one process "
                "there is one weight. Where a hook or step writes into weights, let every rank write the same: take "
                "numbers of a batch as a mean over the replicas (`self.all_gather(x).mean(0)`), draw from a generator "
                "with one seed on all ranks, and write on all ranks, not on the first one only."
            )

    def _is_common(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether every replica has all of a weight now: not an expert's, and not spread over the replicas."""
        return self._sums.is_whole(parameter) and not self._gradients.holders_of(name).of_experts


class EqualStages:
    """Compares the weights that several stages of one pipeline have.

    Args:
        module: this rank's part of the user's module.
        presence: knows which stages have a weight.
        gradients: of the module; knows which weights are spread over replicas.
        processes: of the strategy.
    """

    def __init__(self, module: nn.Module, presence: Presence, gradients: ModelGradients, processes: Processes) -> None:
        self._module, self._gradients = module, gradients
        self._sums = WeightSums(gradients, processes, "pipeline_parallel", _APART_STAGES)
        self._names = [
            name
            for name, entry in presence.entries.items()
            if entry.first == name and len(entry.stages) > 1 and isinstance(entry.twin, nn.Parameter)
            if not presence.copies.covers(name)  # which hooks bring up to date part by part
        ]
        self._firsts = {name: presence.entries[name].first for name in presence.entries}
        self._steps, self._always = 0, False
        if self._names:
            self._always = any(objects.gather(writes_unseen(module), processes.mesh.group("pipeline_parallel")))

    @torch.no_grad()
    def check(self) -> None:
        """Compare after the backwards of a step, if it is its turn; collective over the pipeline.

        Raises:
            RuntimeError: a weight differs, on every stage.
        """
        turn, self._steps = self._always or is_due(self._steps, first=4), self._steps + 1
        if not (turn and self._names):
            return
        self._gradients.finish_gather(spread=False)
        listed = type(self._module).named_parameters(self._module, remove_duplicate=False)
        here = {self._firsts.get(name, name): each for name, each in listed if self._sums.is_whole(each)}
        for name, lowest, highest in self._sums.apart({name: here.get(name) for name in self._names}):
            raise RuntimeError(
                f"`{name}` is a weight that several pipeline stages have, and was written on some of "
                f"them only: its elements add up to {lowest!r} on one and {highest!r} on another. The code of a step "
                "after the layers runs on the last stage alone. Write the weight before the layers are called, or in "
                "a hook (`on_train_batch_start`, `on_train_batch_end`) that every rank runs alike, or use "
                "`pipeline_parallel_size=1`."
            )


def comparisons(
    module: nn.Module, stage: Stage | None, gradients: ModelGradients, processes: Processes, *, wanted: bool
) -> tuple[EqualReplicas | None, EqualStages | None]:
    """Comparisons of the weights of a run's replicas, and of its stages: ``None`` where there is one of them.

    Args:
        module: this rank's part of the user's module.
        stage: of the pipeline, if it has several.
        gradients: of the module.
        processes: of the strategy.
        wanted: whether the run trains, and this package divides its module.
    """
    several = wanted and processes.mesh.layout.data > 1
    replicas = EqualReplicas(module, gradients, processes) if several else None
    if not wanted or stage is None:
        return replicas, None
    return replicas, EqualStages(module, stage.presence, gradients, processes)


def _sums(parameter: Tensor) -> Tensor:
    """The sum of the elements and of their magnitudes; 0 where that is no finite number."""
    own = parameter.detach()
    real = torch.view_as_real(own) if own.is_complex() else own
    magnitude = torch.linalg.vector_norm(real, 1)  # without a copy of the weight
    return torch.stack([real.sum(dtype=torch.float64), magnitude.double()]).nan_to_num(0.0, 0.0, 0.0)
