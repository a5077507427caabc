"""The command ``nostall record``: run a program and write launch files of its kernels."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from nostall.attach.launch_recorder import FILE_VARIABLE
from nostall.cli.terminal.console import Format, FormatOption, err, out, show_json, show_table
from nostall.core.errors import BadInput
from nostall.core.files.atomic import create_folder
from nostall.core.text.plurals import pluralize
from nostall.tuning.launches.recorded import RecordedLaunch, read_launches, write_launches

SHIM = Path(__file__).resolve().parents[1] / "attach" / "start_shim"
MAX_SHOWN = 20
"""Launches in the table; the folder has all of them."""

CommandArgument = Annotated[
    list[str], typer.Argument(help="The program and its arguments, after `--`.")
]
OutOption = Annotated[
    Path, typer.Option("--out", help="Folder for the launch files; existing files are kept.")
]


def record(
    command: CommandArgument,
    folder: OutOption = Path("launches"),
    format: FormatOption = Format.TABLE,
) -> None:
    """Run a program and write launch files of its kernels.

    Grids, shapes, types and constants of Triton kernels are noted, those of child processes too,
    and launches by `cuda.bindings.driver.cuLaunchKernel`. Trials of an autotuner are left out, and
    so are the kernels that torch.compile writes. The exit code is that of the program.
    """
    is_new = not folder.exists()
    create_folder(folder)
    if not os.access(folder, os.W_OK):
        raise BadInput(f"cannot write to {folder}: Permission denied; choose a writable folder")
    with tempfile.TemporaryDirectory(prefix="nostall-") as scratch:
        log = Path(scratch) / "launches.jsonl"
        try:
            code = run_recorded(command, log)
            written = write_launches(read_launches(log), folder, shlex.join(command))
        finally:
            if is_new:
                with suppress(OSError):  # it holds launch files
                    folder.rmdir()
    if format is Format.JSON:
        show_json([_document(launch, path, reason) for launch, path, reason in written])
    else:
        _show(written, folder)
    if code:
        raise typer.Exit(code)


def run_recorded(command: list[str], log: Path) -> int:
    """Run the program with the recorder; returns its exit code, 128 + N after signal N.

    ``log``: the file of the launches, for :func:`.read_launches`.
    """
    paths = [str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, FILE_VARIABLE: str(log), "PYTHONPATH": os.pathsep.join(paths)}
    sys.stdout.flush()
    # Ctrl-C in the terminal reaches the program, too; what it launched is then written.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run(
            command,
            env=variables,
            check=False,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    except OSError as error:
        raise BadInput(
            f"cannot run {command[0]!r}: {error.strerror}; write `nostall record -- PROGRAM ARGS`"
        ) from error
    finally:
        signal.signal(signal.SIGINT, previous)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def _show(written: list[tuple[RecordedLaunch, Path | None, str]], folder: Path) -> None:
    if not written:
        err.print(
            "no launches of Triton kernels or of cuLaunchKernel were seen; `nostall init KERNEL` "
            "writes a launch file to fill in"
        )
        return
    show_table(
        f"{pluralize(len(written), 'launch')}; launch files in {folder}",
        ("kernel", "grid", "arguments", "launches", "file"),
        [
            (
                launch.kernel,
                "x".join(map(str, launch.fields.get("grid", ()))),
                ", ".join(map(_argument, launch.fields["args"])),
                launch.count,
                path.name if path is not None else f"none: {reason}",
            )
            for launch, path, reason in written[:MAX_SHOWN]
        ],
    )
    for launch, path, _ in written:
        if path is not None and launch.target is not None:
            words = ["nostall", "tune", launch.target, "--launch", str(path)]
            out.print(f"next:     {shlex.join(words)}")
            return


def _argument(argument: dict[str, Any]) -> str:
    """A short text of an argument."""
    name = argument.get("name")
    if "shape" in argument:
        return f"{name}: {argument['dtype']}[{'x'.join(map(str, argument['shape']))}]"
    for key in ("value", "constant", "undescribed"):
        if key in argument:
            return f"{name} = {argument[key]}"
    return str(name)


def _document(launch: RecordedLaunch, path: Path | None, reason: str) -> dict[str, Any]:
    return {
        "kernel": launch.kernel,
        "target": launch.target,
        "launches": launch.count,
        "file": str(path) if path is not None else None,
        "reason": reason or None,
        **launch.fields,
    }
