"""How all commands behave: one style of error, no traceback for a user's mistake, a sign of life in long work."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup


class CommandGroup(TyperGroup):
    """Prints what is wrong with a call as ``Error: ...`` in one line, without a box whose borders break it apart.

    A line can be searched for, copied and read by scripts. The exit code is 2, and 130 after Ctrl-C.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line, as the method of typer that this one replaces."""
        try:
            result = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            typer.echo("Stopped.", err=True)
            sys.exit(130)
        except Exception as error:
            if not standalone_mode or not hasattr(error, "format_message"):  # only errors of calls have that
                raise
            sys.exit(_told(error))
        if not standalone_mode:
            return result
        sys.exit(result if isinstance(result, int) else 0)


def _told(error: Any) -> int:
    """Print an error of a call, and return the exit code."""
    context: Any = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        if said := error.format_message():  # with rich, the help was printed when the error was made
            typer.echo(said)
        return 2
    said = error.format_message().removeprefix("Invalid value: ").removesuffix(" (Possible options: --help)")
    typer.echo(f"Error: {said}", err=True)
    if context is not None:
        typer.echo(f"`{context.command_path} --help` lists what it takes.", err=True)
    return int(error.exit_code)


@contextmanager
def refusing(option: str | None = None) -> Iterator[None]:
    """Turn errors that a user's values and files cause into refusals of the call.

    Args:
        option: the one that the values come from, named in the message.
    """
    try:
        yield
    except OSError as error:
        said = f"`{error.filename}`: {error.strerror.lower()}" if error.filename and error.strerror else str(error)
        raise typer.BadParameter(said, param_hint=option) from error
    except UnicodeDecodeError as error:
        raise typer.BadParameter("this file is no text in UTF-8", param_hint=option) from error
    except (ImportError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def read_json(file: Path, option: str) -> Any:
    """The content of a JSON file; any other file is refused with the option that named it."""
    with refusing(option):
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"`{file}` is not JSON: {error}") from error


def check_plot(file: Path | None) -> None:
    """Refuse a picture that could not be written, before any work.

    Raises:
        ValueError: it has another format, or no folder.
    """
    if file and file.suffix.lower() != ".svg":
        raise ValueError(f"`--plot {file}` must end in .svg, the format that is written")
    if file and not file.absolute().parent.is_dir():
        raise ValueError(f"`--plot {file}`: there is no folder {file.parent}; make it first")


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal what is being done, and for how long; prints nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    plain = {"redirect_stdout": False, "redirect_stderr": False}
    with Progress(*columns, console=Console(stderr=True), transient=True, **plain) as shown:  # type: ignore[arg-type]
        shown.add_task(what, total=None)
        yield
