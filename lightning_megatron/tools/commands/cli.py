"""The ``lightning-megatron`` command: studies layouts, schedules and checkpoints without a launch, and generates.

Each command is a function in its own file in ``commands/``, and is registered here by one line.
"""

from __future__ import annotations

from typing import Annotated

import typer

from lightning_megatron.mesh.lazy import offered
from lightning_megatron.tools.commands.checkpoint import app as checkpoint
from lightning_megatron.tools.commands.conduct import CommandGroup
from lightning_megatron.tools.commands.explain import explain
from lightning_megatron.tools.commands.generate import generate
from lightning_megatron.tools.commands.plan import plan
from lightning_megatron.tools.commands.predict import predict
from lightning_megatron.tools.commands.rehearse import rehearse
from lightning_megatron.tools.commands.timeline_command import timeline

app = typer.Typer(
    name="lightning-megatron",
    help="Study pipeline schedules and layouts before training with lightning_megatron.",
    no_args_is_help=True,
    cls=CommandGroup,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"lightning-megatron {offered('__version__')}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Study pipeline schedules and layouts before training with lightning_megatron."""


app.command("timeline")(timeline)
app.command("plan")(plan)
app.command("predict")(predict)
app.command("explain")(explain)
app.command("rehearse")(rehearse)
app.command("generate")(generate)
app.add_typer(checkpoint, name="checkpoint")


def main() -> None:
    """Entry point of the ``lightning-megatron`` script."""
    app()


if __name__ == "__main__":
    main()
