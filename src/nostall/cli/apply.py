"""``nostall apply -- python app.py``: run an unchanged program with what the store has."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from nostall.attach.apply import environment
from nostall.attach.store_lookup import MODELLED
from nostall.cli.console import err
from nostall.core import BadInput
from nostall.store import BadStore, Store


def apply(
    command: Annotated[
        list[str], typer.Argument(help="The program and its arguments, after `--`.")
    ],
    modelled: Annotated[
        bool, typer.Option("--modelled", help="Use results whose gain is only modelled, too.")
    ] = False,
    log: Annotated[
        Path | None, typer.Option(help="Append one line of JSON for each cubin asked for.")
    ] = None,
) -> None:
    """Run a program; Triton kernels, torch.compile's too, come from the store where it has them.

    The program and all its children run as they would without nostall, and so does the exit code;
    Triton's own cache stays as it is.
    """
    changed = environment(os.environ, modelled=modelled, log=log)
    _say_what_lacks(modelled=changed[MODELLED] == "1")
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, changed)
    except OSError as error:
        raise BadInput(
            f"cannot run {command[0]!r}: {error.strerror}; write `nostall apply -- PROGRAM ARGS`"
        ) from error


def _say_what_lacks(*, modelled: bool) -> None:
    """One line when the store has nothing for any program; that stops none."""
    try:
        usable = any(modelled or row.kind == "measured" for row in Store().rows())
    except BadStore as error:
        err.print(f"nostall: {error}; the program runs with its originals")
        return
    if not usable:
        err.print("nostall: the store has no record to apply; the program runs with its originals")
