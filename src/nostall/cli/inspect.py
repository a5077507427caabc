"""``nostall inspect``: what a kernel consists of, what can move, and what pins the rest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from nostall.cli.console import Format, FormatOption, out, show_json, show_table
from nostall.cli.inputs import ArchOption, source
from nostall.sass import Function, Program
from nostall.sass.safety import validate
from nostall.sass.schedule import ScheduleSpace
from nostall.sass.schedule.mobility import mobility


def inspect(
    target: Annotated[str, typer.Argument(help="A cubin, a fatbin, or path.py:kernel for Triton.")],
    kernel: Annotated[
        str | None, typer.Option(help="Which kernel, when there are several.")
    ] = None,
    launch: Annotated[Path | None, typer.Option(help="Launch specification (TOML).")] = None,
    arch: ArchOption = None,
    listing: Annotated[bool, typer.Option("--listing", help="Print every instruction.")] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show a kernel's instructions, mobility, pins by cause and the verifier's view of it."""
    found = source(target, kernel, launch, arch)
    program = Program.from_cubin(found.cubin)
    function = program.kernel(found.kernel)
    facts = _facts(program, function, found.cubin)
    if format is Format.JSON:
        show_json(facts)
        return
    _show(facts, function, listing)


def _facts(program: Program, function: Function, data: bytes) -> dict[str, Any]:
    space = ScheduleSpace(program, function)
    moving = mobility(space)
    verdict = validate(data)
    pipes = Counter(i.pipe for i in function.instructions)
    return {
        "kernel": function.name,
        "architecture": f"sm_{program.sm}",
        "kernels": [f.name for f in program.kernels],
        "instructions": len(function.instructions),
        "blocks": len(function.blocks),
        "pipes": dict(pipes.most_common()),
        "movable": moving.movable,
        "movable_share": round(moving.share, 4),
        "pins": moving.pins,
        "unmodelled": sorted({i.base for i in function.instructions if not i.is_known_opcode}),
        "safe": verdict.safe,
        "findings": [str(f) for f in verdict.findings[:20]],
    }


def _show(facts: dict[str, Any], function: Function, listing: bool) -> None:
    if listing:
        for at, instruction in enumerate(function.instructions):
            out.print(f"{at * 16:06x}  {instruction.control}  {instruction.text}")
    rows = [
        ("architecture", facts["architecture"]),
        ("instructions", facts["instructions"]),
        ("blocks", facts["blocks"]),
        ("pipes", ", ".join(f"{k} {v}" for k, v in facts["pipes"].items())),
        ("with a legal slide", f"{facts['movable']} ({facts['movable_share']:.1%})"),
        *((f"pinned: {cause}", count) for cause, count in facts["pins"].items()),
        ("unmodelled opcodes", ", ".join(facts["unmodelled"]) or "none"),
        ("validator", "holds" if facts["safe"] else "; ".join(facts["findings"][:3])),
    ]
    show_table(facts["kernel"], ("fact", "value"), rows)
