"""Command line of nostall: one module a command, imported when the command is used.

A command that has modules of its own is in a folder with them.

Exit codes: 0 success (safe, or no slower); 1 a negative answer, such as an unsafe cubin; 2 bad
usage or bad input; 3 a missing part of the environment; 130 interrupted without a result.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated

import typer

from nostall import __version__
from nostall.cli.terminal import console
from nostall.cli.verbs import Verbs
from nostall.core.errors import NostallError
from nostall.core.files.atomic import write_remedy

INTERRUPTED = 130
"""Exit code after Ctrl-C if there is no result."""

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"nostall {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
    ),
]


@app.callback()
def nostall(version: VersionOption = False) -> None:
    """Find where a deep-learning program waits, and remove the wait.

    `nostall optimize` tries changes on a whole program and keeps what is proven faster. Other
    commands show where time goes in traces and job tables, tune kernels (PTX and SASS), fuse
    PyTorch functions, plan training on several GPUs, and simulate serving. A verifier checks each
    changed cubin. Times are marked as modelled or measured; most commands need no GPU.
    """


def main() -> None:
    """Entry point: print errors that nostall raises deliberately on one line, set the exit code."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # The terminal's encoding may lack characters of file names.
            stream.reconfigure(errors="backslashreplace")
    try:
        _run_app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            console.print_error("interrupted")
        raise
    except NostallError as error:
        console.print_error(" ".join(str(error).split()))
        sys.exit(error.exit_code)
    except MemoryError:
        console.print_error("out of memory; give a smaller input or use a machine with more memory")
        sys.exit(2)
    except KeyboardInterrupt:
        console.print_error("interrupted")
        sys.exit(INTERRUPTED)
    except RecursionError:
        console.print_error("an input is nested too deeply; give a simpler one")
        sys.exit(2)
    except OSError as error:
        file = f" {error.filename}" if error.filename else ""
        is_clear = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EISDIR)
        remedy = write_remedy(error) if is_clear else "check the path and its permissions"
        console.print_error(f"cannot read or write{file}: {error.strerror or error}; {remedy}")
        sys.exit(2)
    except Exception as error:
        # A library's clean-up after Ctrl-C may fail with an error of its own.
        if not _hides_interrupt(error):
            raise
        console.print_error("interrupted")
        sys.exit(INTERRUPTED)


def _hides_interrupt(error: BaseException) -> bool:
    """Whether ``error`` was raised while Ctrl-C was handled."""
    seen = {error}
    while (cause := error.__context__) is not None and cause not in seen:
        if isinstance(cause, KeyboardInterrupt):
            return True
        seen.add(cause)
        error = cause
    return False


def _run_app() -> None:
    """Run the command, and raise :class:`OSError` if its output could not be written."""
    printed = sys.stdout
    try:
        app()
    except SystemExit:
        if sys.stdout is not printed:  # Typer replaces it and exits with 1 if its reader ended
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE), "the output") from None
        printed.flush()
        raise


def _open_standard_streams() -> None:
    """Open the null device as each standard stream that the shell closed.

    Otherwise the next file that is opened would get the descriptor, and everything that is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115
