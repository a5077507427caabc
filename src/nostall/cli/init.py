"""The command ``nostall init``: write a first launch file for a kernel of your own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.options.inputs import ArchOption, KernelOption, TargetArgument, load_source
from nostall.cli.terminal.console import Format, FormatOption, out, show_json
from nostall.core.errors import BadInput
from nostall.core.files.atomic import is_stream, write_text_atomically
from nostall.tuning.launches.recorded import launch_toml
from nostall.tuning.launches.template import (
    Template,
    template_of_cubin,
    template_of_ptx,
    template_of_triton,
)
from nostall.tuning.sources.triton_source import import_triton

OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="File to write; default: KERNEL.toml in this folder."),
]


def init(
    target: TargetArgument,
    kernel: KernelOption = None,
    arch: ArchOption = None,
    out_file: OutOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Write a launch file for a kernel of your own.

    Comments say what to fill in. The arguments come from the cubin's parameter records, from the
    parameter list of PTX, or from the signature of a Triton function. `nostall record` writes
    launch files of real calls.
    """
    template, name = _template(target, kernel, arch)
    path = out_file or Path(f"{_file_name(name)}.toml")
    if path.exists() and not is_stream(path):
        raise BadInput(f"{path} exists already; give another file with --out")
    header = [
        f"Launch of the kernel {name} in {target}, written by `nostall init`.",
        "All keys: docs/reference/launch-spec.md",
    ]
    text = launch_toml(template.launch, header, template.comments, template.keys)
    write_text_atomically(path, text)
    words = ["nostall", "tune", target, *(["--kernel", kernel] if kernel else [])]
    words += [*(["--arch", arch] if arch else []), "--launch", str(path)]
    if format is Format.JSON:
        launch = template.launch.model_dump(mode="json")
        open_points = [key for key, c in template.comments.items() if c.startswith("TODO")]
        show_json({"file": str(path), "kernel": name, "launch": launch, "todo": open_points})
        return
    count = len(template.launch.args)
    out.print(f"wrote:    {path} ({count} arguments; {template.open_points} points marked TODO)")
    if template.open_points:
        out.print("edit:     the TODO lines: grid, sizes, types and roles as in your program")
    out.print(f"next:     {shlex.join(words)}")


def _template(target: str, kernel: str | None, arch: str | None) -> tuple[Template, str]:
    """The template of a kernel, and the kernel's name."""
    path, colon, name = target.rpartition(":")
    if colon and path.endswith(".py"):
        name = kernel or name
        return template_of_triton(import_triton(), Path(path).absolute(), name), name
    source = load_source(target, kernel, None, arch)
    if target.endswith(".ptx") and source.ptx is not None:
        return template_of_ptx(source.ptx, source.kernel, source.cubin), source.kernel
    return template_of_cubin(source.cubin, source.kernel), source.kernel


def _file_name(kernel: str) -> str:
    """A file name for a kernel; names of C++ templates are cut."""
    return "".join(c if c.isalnum() or c in "-_@" else "_" for c in kernel)[:60]
