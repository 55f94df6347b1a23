"""One row of the parity table: which module, laid out how, trained how."""

from __future__ import annotations

from dataclasses import dataclass, replace

# pipeline, data, tensor
LAYOUTS: dict[str, tuple[int, int, int]] = {
    "pp2": (2, 1, 1),
    "pp3": (3, 1, 1),
    "pp4": (4, 1, 1),
    "pp2xdp2": (2, 2, 1),
    "dp2": (1, 2, 1),
    "tp2": (1, 1, 2),
    "pp2xtp2": (2, 1, 2),
    "dp2xtp2": (1, 2, 2),
    "cp2": (1, 1, 1),
    "cp3": (1, 1, 1),
    "dp2xcp2": (1, 2, 1),
    "pp2xcp2": (2, 1, 1),
    "pp2xcp3": (2, 1, 1),
    "pp3xcp2": (3, 1, 1),
    "pp2xdp2xcp2": (2, 2, 1),
    "cp2xtp2": (1, 1, 2),
    "cp3xtp2": (1, 1, 2),
    "pp2xcp2xtp2": (2, 1, 2),
    "cp2xtp2xsp": (1, 1, 2),
    "cp3xtp2xsp": (1, 1, 2),
    "pp2xcp2xtp2xsp": (2, 1, 2),
}
CONTEXT = {name: int(part[2:]) for name in LAYOUTS for part in name.split("x") if part.startswith("cp")}
"""Context ranks of a layout; 1 in the others."""
CLIPS: dict[str, tuple[float, str] | None] = {"none": None, "norm": (0.5, "norm"), "value": (0.01, "value")}
# Optimizer steps by batches per step. Three batches are an epoch: one epoch, or two where batches are added up, of
# which Hugging Face's modules do not know. What comes after repeats it, unless learning rates go by epochs.
STEPS = {1: 3, 2: 4}
EPOCH = {1: 3, 2: 2}
BY_EPOCH = ("flat_module", "plateau", "one_optimizer", "end_groups", "fused")


@dataclass(frozen=True)
class Row:
    """A training run.

    Attributes:
        module: key of the zoo.
        layout: key of `LAYOUTS`, or ``"one"`` for the plain one-process Trainer.
        schedule: name of the pipeline schedule.
        clip: key of `CLIPS`.
        accumulate: batches per optimizer step.
        micro_batch: samples per micro-batch and replica, or 0 to leave it to the strategy.
        strategy: ``"megatron"``, ``"plain"`` or ``"ddp"``.
    """

    module: str
    layout: str = "pp2"
    schedule: str = "1f1b"
    clip: str = "none"
    accumulate: int = 1
    micro_batch: int = 2
    strategy: str = "megatron"

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        steps = EPOCH if self.module.startswith("hf_") else STEPS
        return 6 if self.module in BY_EPOCH else steps[self.accumulate]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Pipeline, data-parallel and tensor-parallel size."""
        return LAYOUTS.get(self.layout, (1, 1, 1))

    @property
    def devices(self) -> int:
        pipeline, data, tensor = self.sizes
        return pipeline * data * tensor * self.context

    @property
    def context(self) -> int:
        """Context-parallel size."""
        return CONTEXT.get(self.layout, 1)

    @property
    def sequence(self) -> bool:
        """Whether tensor ranks share the tokens between regions (sequence parallelism)."""
        return self.layout.endswith("sp")

    @property
    def reference(self) -> Row:
        """The same training on one process; rows that differ only in layout share it."""
        return replace(self, layout="one", schedule="1f1b", micro_batch=0, strategy="plain")

    def __str__(self) -> str:
        micro = f"mb{self.micro_batch}" if self.micro_batch else "mbauto"
        return f"{self.module}-{self.layout}-{self.schedule}-{self.clip}-acc{self.accumulate}-{micro}"
