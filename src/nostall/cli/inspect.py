"""The command ``nostall inspect``: a kernel's instructions, how many can move, and its verdict."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nostall.cli.options.inputs import (
    ArchOption,
    KernelOption,
    LaunchOption,
    TargetArgument,
    load_source,
)
from nostall.cli.terminal.console import Format, FormatOption, out, show_json, show_table

if TYPE_CHECKING:
    from nostall.sass import Function, Program
    from nostall.tuning.sources.source import Source

MAX_FINDINGS = 20
"""Findings in the JSON document."""
MAX_SHOWN_FINDINGS = 3

ListingOption = Annotated[bool, typer.Option("--listing", help="Print every instruction.")]


def inspect(
    target: TargetArgument,
    kernel: KernelOption = None,
    launch: LaunchOption = None,
    arch: ArchOption = None,
    listing: ListingOption = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show a kernel's instructions and which of them can move.

    Also shown: why the other instructions are pinned, what the verifier finds in the cubin, what
    the kernel waits for in the SM model, and what searches gained on such kernels.
    """
    from nostall.sass import Program

    source = load_source(target, kernel, launch, arch)
    program = Program.of_kernel(source.cubin, source.kernel)
    function = program.kernel(source.kernel)
    properties = _properties(program, function) | _room(program, function, source)
    if format is Format.JSON:
        show_json(properties)
        return
    _show(properties, function, listing)


def _properties(program: Program, function: Function) -> dict[str, Any]:
    """The JSON document."""
    from nostall.sass.safety.verify import validate_program
    from nostall.sass.schedule import ScheduleSpace
    from nostall.sass.schedule.mobility import mobility

    space = ScheduleSpace(program, function)
    moving = mobility(space)
    verdict = validate_program(program)
    pipes = Counter(i.pipe for i in function.instructions)
    return {
        "kernel": function.name,
        "architecture": f"sm_{program.sm}",
        "kernels": [text.name for text in program.cubin.texts if text.is_kernel],
        "instructions": len(function.instructions),
        "blocks": len(function.blocks),
        "pipes": dict(pipes.most_common()),
        "movable": moving.movable,
        "movable_share": round(moving.share, 4),
        "pins": moving.pins,
        "unmodelled": sorted({i.base for i in function.instructions if not i.is_known_opcode}),
        "safe": verdict.safe,
        "findings": [str(finding) for finding in verdict.findings[:MAX_FINDINGS]],
    }


def _room(program: Program, function: Function, source: Source) -> dict[str, Any]:
    """What a search may find: fields of the JSON document."""
    from nostall.core.errors import NostallError
    from nostall.tuning.distance_check import are_measured
    from nostall.tuning.launches.template import template_of_cubin
    from nostall.tuning.room import describe_bound, kind_of, load_gains, modelled_bound

    gains, kind = load_gains(), kind_of(function)
    measured = [gains.sentence("assembler", kind)] if source.ptx is not None else []
    measured.append(gains.sentence("native moves", kind))
    if not are_measured(source.cubin):
        measured.append(f"on sm_{program.sm} no search was measured")
    room: dict[str, Any] = {"kind": kind, "measured_gains": measured, "modelled_bound": None}
    launch, assumed = source.launch, ""
    try:
        if launch is None:
            launch = template_of_cubin(source.cubin, source.kernel).launch
            assumed = (
                f"; assumed are {launch.blocks} blocks of {launch.threads} threads, give "
                "--launch FILE"
            )
        room["modelled_bound"] = modelled_bound(program, function, launch)
        room["bound"] = describe_bound(room["modelled_bound"]) + assumed
    except NostallError as error:
        room["bound"] = f"not modelled: {error}"
    return room


def _show(properties: dict[str, Any], function: Function, listing: bool) -> None:
    if listing:
        for position, instruction in enumerate(function.instructions):
            out.print(f"{position * 16:06x}  {instruction.control}  {instruction.text}")
    findings = "; ".join(properties["findings"][:MAX_SHOWN_FINDINGS])
    rows = [
        ("architecture", properties["architecture"]),
        ("instructions", properties["instructions"]),
        ("blocks", properties["blocks"]),
        ("pipes", ", ".join(f"{pipe} {n}" for pipe, n in properties["pipes"].items())),
        ("movable", f"{properties['movable']} ({properties['movable_share']:.1%})"),
        *((f"pinned: {cause}", count) for cause, count in properties["pins"].items()),
        ("unmodelled opcodes", ", ".join(properties["unmodelled"]) or "none"),
        ("verifier", "safe" if properties["safe"] else findings),
    ]
    show_table(properties["kernel"], ("property", "value"), rows)
    for line in (properties.get("bound"), *properties["measured_gains"]):
        if line is not None:
            out.print(line)
