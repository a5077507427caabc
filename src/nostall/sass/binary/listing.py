"""nvdisasm's listing as rows: offset, text, word, and the register marks of each instruction.

Command: ``nvdisasm -lrm narrow -hex -c``.  Each instruction prints two lines; the second carries
one character per register in column groups GPR, PRED, UGPR, UPRED.  Only the marks ``^`` (defined),
``v`` (used) and ``x`` (both) are read: the liveness mark differs between tool versions.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass

from nostall.core.errors import BadBinary
from nostall.sass.binary import toolchain
from nostall.sass.binary.cubin import Cubin, disassemblable

GROUPS = {"GPR": "R", "PRED": "P", "UGPR": "UR", "UPRED": "UP"}

_SECTION = re.compile(r"^\t\.section\t\.text\.(.+?),\"")
_FIRST = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"^(\.L_[\w.$]+|[\w.$]+):")
_MARK = re.compile(r"[\^vx]")

Register = tuple[str, int]
"""(file, index), such as ("UR", 4)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One instruction of a listing."""

    offset: int
    text: str
    word: int
    defs: tuple[Register, ...]
    uses: tuple[Register, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """One text section; ``labels`` maps a label to the offset it stands before."""

    name: str
    rows: tuple[Row, ...]
    labels: dict[str, int]


def disassemble(cubin: Cubin) -> dict[str, Listing]:
    """Run nvdisasm on a scratch copy; one listing per text section."""
    with tempfile.NamedTemporaryFile(suffix=".cubin", prefix="nostall-") as scratch:
        scratch.write(disassemblable(cubin.data, cubin.sm))
        scratch.flush()
        tool = str(toolchain.find("nvdisasm"))
        text = toolchain.run([tool, "-lrm", "narrow", "-hex", "-c", scratch.name], "nvdisasm")
    return parse(text)


def parse(text: str) -> dict[str, Listing]:
    """Parse nvdisasm's output."""
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if line.startswith("\t.section\t"):
            found = _SECTION.match(line)
            current = sections.setdefault(found[1], []) if found else None
        elif current is not None and line:
            current.append(line)
    return {name: _listing(name, lines) for name, lines in sections.items()}


def _listing(name: str, lines: list[str]) -> Listing:
    rows: list[Row] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    columns: dict[int, Register] = {}
    bars: str | None = None
    first: tuple[int, str, int] | None = None
    for line in lines:
        if first is not None:
            second = _SECOND.match(line)
            if second is None:
                raise BadBinary(f"nvdisasm printed {line.strip()[:60]!r} inside an instruction")
            defs, uses = _marks(line, columns)
            word = first[2] | int(second[1], 16) << 64
            rows.append(Row(first[0], first[1], word, defs, uses))
            first = None
            continue
        start = _FIRST.match(line)
        if start is not None:
            first = (int(start[1], 16), start[2].rstrip(" ;"), int(start[3], 16))
            for label in waiting:
                labels[label] = first[0]
            waiting = []
        elif "// |" in line and not line.lstrip().startswith("/*"):
            here = _LABEL.match(line)
            if here:
                waiting.append(here[1])
            elif "GPR" in line or "PRED" in line:
                bars = line
            elif "#" in line and bars is not None:
                columns = _columns(bars, line)
        else:
            here = _LABEL.match(line)
            if here:
                waiting.append(here[1])
    end = rows[-1].offset + 16 if rows else 0
    labels.update(dict.fromkeys(waiting, end))
    return Listing(name, tuple(rows), labels)


def _columns(names: str, digits: str) -> dict[int, Register]:
    """The register of each column, from the two header lines."""
    found: dict[int, Register] = {}
    start = names.index("// |") + 4
    while (end := names.find("|", start)) >= 0:
        file = GROUPS.get(names[start:end].strip())
        zero = digits.find("0", digits.find("#", start, end), end)
        if file is not None and zero >= 0:
            found.update((at, (file, at - zero)) for at in range(zero, end))
        start = end + 1
    return found


def _marks(
    line: str, columns: dict[int, Register]
) -> tuple[tuple[Register, ...], tuple[Register, ...]]:
    defs: list[Register] = []
    uses: list[Register] = []
    for mark in _MARK.finditer(line, line.find("// |")):
        register = columns.get(mark.start())
        if register is None:
            continue
        if mark[0] != "v":
            defs.append(register)
        if mark[0] != "^":
            uses.append(register)
    return tuple(defs), tuple(uses)
