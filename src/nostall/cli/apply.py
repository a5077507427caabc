"""The command ``nostall apply``: run a program with the optimised kernels of the store."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from nostall.attach import gpu_name
from nostall.attach.apply import environment
from nostall.attach.store_lookup import MODELLED
from nostall.cli.terminal.console import err
from nostall.core import BadInput
from nostall.core.files.atomic import is_stream, write_remedy
from nostall.store import BadStore, Store

CommandArgument = Annotated[
    list[str], typer.Argument(help="The program and its arguments, after `--`.")
]
ModelledOption = Annotated[
    bool, typer.Option("--modelled", help="Use results whose gain is only modelled, too.")
]
BundleOption = Annotated[
    Path | None, typer.Option(help="Also make the changes of a bundle of `nostall optimize`.")
]
LogOption = Annotated[
    Path | None, typer.Option(help="Append a line of JSON to this file for each requested cubin.")
]


def apply(
    command: CommandArgument,
    bundle: BundleOption = None,
    modelled: ModelledOption = False,
    log: LogOption = None,
) -> None:
    """Run a program with the optimised kernels of the store.

    Triton kernels, including those of torch.compile, are replaced if the store has an optimised
    cubin for them. The same holds for child processes of the program. Triton's own cache is not
    changed. The exit code is that of the program. With a bundle, the program is configured after
    its first steps as `nostall optimize` proved; a bundle of another device, driver or version is
    refused.
    """
    variables = environment(os.environ, modelled=modelled, log=log)
    if log is not None and not is_stream(log):
        try:
            log.open("a").close()
        except OSError as error:
            raise BadInput(
                f"cannot write --log {log}: {error.strerror}; {write_remedy(error)}"
            ) from error
    if bundle is not None:
        from nostall.optimizing.bundle import bundle_environment, read_bundle

        gpu = variables.get(gpu_name.VARIABLE)
        variables = bundle_environment(read_bundle(bundle), bundle.absolute(), variables, gpu)
    else:
        _warn_if_unusable(modelled=variables[MODELLED] == "1")
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, variables)
    except OSError as error:
        raise BadInput(
            f"cannot run {command[0]!r}: {error.strerror}; write `nostall apply -- PROGRAM ARGS`"
        ) from error


def _warn_if_unusable(*, modelled: bool) -> None:
    """Print a line if the store has no record for any program; the program runs anyway."""
    try:
        rows = Store().rows()
    except BadStore as error:
        err.print(f"nostall: {error}; the program runs with its original kernels")
        return
    if not any(modelled or row.kind == "measured" for row in rows):
        others = f" ({len(rows)} modelled only: --modelled uses them)" if rows else ""
        err.print(
            f"nostall: the store has no record to apply{others}; the program runs with its "
            "original kernels"
        )
