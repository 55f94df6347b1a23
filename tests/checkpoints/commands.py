"""The command line for checkpoints, called as a function."""

from __future__ import annotations

from typer.testing import CliRunner

from lightning_megatron.tools.commands.cli import app


def command(*arguments: object, fails: bool = False) -> str:
    """What ``lightning-megatron checkpoint …`` prints; it must fail where ``fails``, and only there."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert (result.exit_code != 0) == fails, result.output
    return result.output
