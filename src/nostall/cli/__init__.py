"""The command line: thin commands, one module a verb.

Exit codes: 0 done, safe, or faster-or-same; 1 the answer is no; 2 bad usage or bad input; 3 a part
of the environment is missing.
"""

from __future__ import annotations

import io
import sys

import typer

from nostall.cli import console
from nostall.cli.verbs import Verbs
from nostall.core.errors import NostallError

INTERRUPTED = 130
"""Exit code after Ctrl-C, where nothing could be kept."""

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def nostall() -> None:
    """Find where a GPU kernel waits, and take the wait out."""


def main() -> None:
    """Entry point: every error nostall raises on purpose becomes one line and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            console.fail("interrupted before anything was found")
        raise
    except NostallError as error:
        console.fail(" ".join(str(error).split()))
        sys.exit(error.exit_code)
    except MemoryError:
        console.fail("out of memory; give a smaller input or a machine with more memory")
        sys.exit(2)
    except KeyboardInterrupt:
        console.fail("interrupted")
        sys.exit(INTERRUPTED)
    except RecursionError:
        console.fail("an input is nested too deeply; give a simpler one")
        sys.exit(2)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        console.fail(f"cannot read or write{where}: {error.strerror or error}")
        sys.exit(2)
