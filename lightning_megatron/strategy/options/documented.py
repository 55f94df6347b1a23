"""The options in the documentation of the strategy, which takes them as arguments."""

from __future__ import annotations

from typing import TypeVar

from lightning_megatron.strategy.options.options import Options

Strategy = TypeVar("Strategy")

_LIGHTNINGS = """
        accelerator: see Lightning.
        parallel_devices: see Lightning.
        cluster_environment: see Lightning.
        checkpoint_io: see Lightning; by default ``MegatronCheckpointIO``.
        precision_plugin: see Lightning."""


def documents_options(strategy: type[Strategy]) -> type[Strategy]:
    """Class decorator: describe the options, and Lightning's own arguments, in front of what the class raises."""
    if strategy.__doc__ and Options.__doc__:  # `python -OO` leaves them out
        section = Options.__doc__.partition("    Args:\n")[2].partition("\n    Raises:\n")[0].rstrip("\n ")
        described = f"    Args:\n{section}{_LIGHTNINGS}\n\n    Raises:\n"
        strategy.__doc__ = strategy.__doc__.replace("    Raises:\n", described, 1)
    return strategy
