"""A strategy that leaves its layout, or the numbering of its processes, to the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.mesh.layout import Layout, resolve_layout
from lightning_megatron.strategy.layout_request import Choice
from lightning_megatron.strategy.optimization_strategy import OptimizationStrategy
from lightning_megatron.strategy.step.assembly import ModuleOptions
from lightning_megatron.strategy.step.scheduled import EngineOptions

if TYPE_CHECKING:
    from lightning_megatron.planner import Plan, Prediction, Recipe

_CHOSEN = ("micro_batch_size", "schedule", "chunks", "sequence_parallel")


class PlannedStrategy(OptimizationStrategy):
    """Settles ``layout="auto"`` and ``topology`` before the processes connect.

    Attributes:
        plan: what the planner found; ``None`` before training, and where the layout was given.
    """

    _choice: Choice
    _module_options: ModuleOptions
    _engine_options: EngineOptions
    plan: Plan | None = None

    @classmethod
    def from_plan(cls, plan: Plan | Prediction | Recipe, **arguments: Any) -> Self:
        """The strategy that runs what the planner found.

        Args:
            plan: of :func:`lightning_megatron.planner.plan` (its best layout), one of its predictions, or a recipe.
            arguments: further arguments of the strategy.

        Raises:
            ValueError: the strategy cannot run it.
        """
        from lightning_megatron.strategy.planning import recipe_of, strategy_arguments

        return cls(**{**strategy_arguments(recipe_of(plan)), **arguments})

    def _settle_layout(self) -> None:
        """Ask the planner for what was left to it, once."""
        if not self._choice.asks or self._numbers is not None or self.plan is not None:
            return
        from lightning_megatron.strategy.planning import choose, numbering, strategy_arguments

        assert self.lightning_module is not None
        module, world = self.lightning_module, self.num_nodes * self.num_processes
        if self._choice.auto:
            self.plan = choose(self._choice, module, world, self.num_processes, self.root_device)
            self._adopt(strategy_arguments(self.plan.best.recipe))
            rank_zero_info(f"layout='auto': {self.plan.best.recipe.describe()}\n{self.plan.explanation}")
        if self._choice.topology is not None:
            layout = resolve_layout(world, **self._sizes)
            self._numbers, speeds = numbering(self._choice, module, self._recipe(layout), layout)
            self._module_options = replace(self._module_options, stage_speeds=speeds)

    def _adopt(self, arguments: Mapping[str, Any]) -> None:
        """Become, as far as the layout goes, the strategy that these arguments make."""
        twin = type(self)(**arguments)
        self._sizes = twin._sizes
        recompute = twin._module_options.activation_recompute
        self._module_options = replace(self._module_options, activation_recompute=recompute)
        settings = {name: getattr(twin._engine_options, name) for name in _CHOSEN}
        gradients = replace(self._engine_options.gradients, sharding=twin._engine_options.gradients.sharding)
        self._engine_options = replace(self._engine_options, **settings, gradients=gradients)

    def _recipe(self, layout: Layout) -> Recipe:
        """This layout in the planner's words; the batch is filled in later."""
        if self.plan is not None:
            return self.plan.best.recipe
        from lightning_megatron.planner import Recipe

        size = self._engine_options.micro_batch_size
        return Recipe(
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            data=layout.data,
            micro_batch=size if isinstance(size, int) else 1,
            global_batch=layout.data * (size if isinstance(size, int) else 1),
            recompute="full" if self._module_options.activation_recompute == "full" else "none",
        )
