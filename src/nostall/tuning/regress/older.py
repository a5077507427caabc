"""An older ptxas: PTX that it accepts, the proof that nothing newer is used, and known faults."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nostall.core.errors import BadInput
from nostall.ptx.assemble.command import Command
from nostall.ptx.assemble.known_faults import describe_faults, known_faults
from nostall.ptx.assemble.ptxas import PtxasRun, run_ptxas
from nostall.ptx.assemble.versions import Assembler, version_numbers
from nostall.ptx.program.module import parse
from nostall.sass.binary.code_hash import code_sha256
from nostall.tuning.assembler.candidate import hazards

_VERSION = re.compile(r"^(\s*\.version\s+)(\d+\.\d+)", re.MULTILINE)
_HIGHEST = re.compile(r"Unsupported \.version [\d.]+; current version is '([\d.]+)'")
"""What ptxas says of PTX of a newer version than its own."""


@dataclass(frozen=True)
class Assembled:
    """A run of ptxas on PTX whose ``.version`` it accepts."""

    run: PtxasRun
    lowered: str = ""
    """How ``.version`` was lowered, such as ``9.4 → 9.2``; "" if it was not."""


@dataclass(frozen=True)
class Offer:
    """Whether an older ptxas may be used in the place of the newer one."""

    version: str
    offered: bool
    reason: str


def assemble_with(ptx: str, command: Command, assembler: Assembler, newer: Assembler) -> Assembled:
    """Assemble with ``assembler``; PTX that is too new for it gets the ``.version`` that it knows.

    That is done only with a proof by ``newer``, which refuses instructions that need more than
    their ``.version``: it makes the same machine code of both texts.  Raises :class:`BadInput`
    without the proof, and if ``assembler`` refuses the PTX.
    """
    run = _run(ptx, command, assembler)
    text, lowered = lower_version(ptx, run)
    if lowered:
        _prove(ptx, text, command, newer, lowered)
        run = _run(text, command, assembler)
    if run.status != "assembled":
        raise BadInput(f"ptxas {assembler.version} refuses this PTX: {run.detail}; give another")
    return Assembled(run, lowered)


def lower_version(ptx: str, run: PtxasRun) -> tuple[str, str]:
    """The PTX with the ``.version`` that a run of ptxas asks for, and the change in words.

    The words are empty if the run did not refuse the PTX's ``.version``.
    """
    highest, present = _HIGHEST.search(run.detail), _VERSION.search(ptx)
    if highest is None or present is None:
        return ptx, ""
    version = highest.group(1)
    text = f"{ptx[: present.start(2)]}{version}{ptx[present.end(2) :]}"
    return text, f"{present.group(2)} → {version}"


def _prove(ptx: str, text: str, command: Command, newer: Assembler, lowered: str) -> None:
    before, after = (_run(each, command, newer) for each in (ptx, text))
    if after.status != "assembled":
        raise BadInput(
            f"PTX .version {lowered} is not possible: {after.detail}; give a newer baseline"
        )
    if code_sha256(before.cubin) != code_sha256(after.cubin):
        raise BadInput(
            f"PTX .version {lowered} is not proved to mean the same: ptxas {newer.version} makes "
            "other machine code of it; give a newer baseline"
        )


def _run(ptx: str, command: Command, assembler: Assembler) -> PtxasRun:
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        return run_ptxas(assembler, ptx, command.arguments(), Path(folder))


def offer_older(
    ptx: str, kernel: str, command: Command, older: Assembler, newer: Assembler
) -> Offer:
    """Whether ``older`` may assemble the kernel: no known wrong code, and the verifier agrees."""
    faults = known_faults(parse(ptx), older.version, command.target)
    if faults:
        return Offer(older.version, False, f"it is reported to make {describe_faults(faults)}")
    if version_numbers(older.version) >= version_numbers(newer.version):
        return Offer(older.version, False, f"it is not older than ptxas {newer.version}")
    try:
        assembled = assemble_with(ptx, command, older, newer)
    except BadInput as error:
        return Offer(older.version, False, str(error))
    if found := hazards(assembled.run.cubin, kernel):
        return Offer(older.version, False, f"the verifier rejects its machine code: {found}")
    reason = "no wrong code is known for the patterns of this kernel"
    if assembled.lowered:
        reason += (
            f"; it needs PTX .version {assembled.lowered}, of which ptxas {newer.version} makes "
            "the same machine code"
        )
    return Offer(older.version, True, reason)
