"""Run nvdisasm and parse its listing: offset, text, word and register marks of each instruction.

Command: ``nvdisasm -lrm narrow -hex -c``.  Each instruction takes two lines.  The second line has
one character for each register, in column groups GPR, PRED, UGPR and UPRED.  The parser reads the
marks ``^`` (defined), ``v`` (used) and ``x`` (both).  It ignores the liveness mark, which differs
between versions of nvdisasm.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from nostall.core.errors import BadBinary
from nostall.sass.binary import subset, toolchain
from nostall.sass.binary.cubin import Cubin, base_name, upgrade_elf_header

REGISTER_FILES = {"GPR": "R", "PRED": "P", "UGPR": "UR", "UPRED": "UP"}
"""Column group -> prefix of its register names."""

_SECTION = re.compile(r"^\t\.section\t\.text\.(.+?),\"")
_FIRST_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND_LINE = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"^(\.L_[\w.$]+|[\w.$]+):")
_MARK = re.compile(r"[\^vx]")

MAX_CODE_BYTES = 1 << 20
"""Machine code that nvdisasm reads at a time, which takes it about 0.5 GB."""

_KEPT_TEXTS = 4
"""Texts of nvdisasm, which takes 0.6 s to begin, that are kept; a search reads its original and its
result several times."""

Register = tuple[str, int]
"""(file, index), such as ("UR", 4)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One instruction of a listing."""

    offset: int
    """Offset in the text section, in bytes."""
    text: str
    """Assembly text without the semicolon."""
    word: int
    """The 128-bit instruction word."""
    defs: tuple[Register, ...]
    """Registers marked as defined."""
    uses: tuple[Register, ...]
    """Registers marked as used."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The listing of one text section."""

    name: str
    rows: tuple[Row, ...]
    labels: dict[str, int]
    """Label -> offset of the instruction after it, in bytes."""


def disassemble(cubin: Cubin, only: Set[str] | None = None) -> dict[str, Listing]:
    """Run nvdisasm on temporary copies of a cubin; returns a listing for each function name.

    ``only`` are the functions to list, by default all.  A large cubin is read some functions at a
    time (see :mod:`.subset`).  Raises :class:`BadBinary` if nvdisasm rejects the cubin or prints an
    unexpected listing.
    """
    is_complete = only is None or only >= {text.name for text in cubin.texts}
    if is_complete and sum(text.size for text in cubin.texts) <= MAX_CODE_BYTES:
        return _list(cubin, cubin.data, [text.name for text in cubin.texts])
    listings: dict[str, Listing] = {}
    for names in _groups(cubin, only):
        bases = {base_name(name) for name in names}
        kept = [text.name for text in cubin.texts if base_name(text.name) in bases]
        listings.update(_list(cubin, subset.cut(cubin.elf, bases), kept))
    return listings


def _list(cubin: Cubin, data: bytes, names: Sequence[str]) -> dict[str, Listing]:
    """The listings of the functions ``names``, in the order of the file, of a part of a cubin.

    nvdisasm gives functions that share a name names of its own; it keeps their order.
    """
    listings = parse(_run_nvdisasm(upgrade_elf_header(data, cubin.sm)))
    if any(name != base_name(name) for name in names) and len(listings) == len(names):
        pairs = zip(names, listings.values(), strict=True)
        return {name: replace(listing, name=name) for name, listing in pairs}
    return listings


def _groups(cubin: Cubin, only: Set[str] | None) -> Iterator[list[str]]:
    """The functions (those in ``only``) in groups of at most ``MAX_CODE_BYTES``, or of one."""
    group: list[str] = []
    size = 0
    for text in cubin.texts:
        if only is not None and text.name not in only:
            continue
        if group and size + text.size > MAX_CODE_BYTES:
            yield group
            group, size = [], 0
        group.append(text.name)
        size += text.size
    if group:
        yield group


def _run_nvdisasm(data: bytes) -> str:
    return _run_tool(str(toolchain.find("nvdisasm")), data)


@functools.lru_cache(maxsize=_KEPT_TEXTS)
def _run_tool(tool: str, data: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin", prefix="nostall-") as copy:
        copy.write(data)
        copy.flush()
        return toolchain.run([tool, "-lrm", "narrow", "-hex", "-c", copy.name], "nvdisasm")


def parse(text: str) -> dict[str, Listing]:
    """Parse the output of nvdisasm; returns a listing for each function name."""
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if line.startswith("\t.section\t"):
            section = _SECTION.match(line)
            current = sections.setdefault(section[1], []) if section else None
        elif current is not None and line:
            current.append(line)
    return {name: _parse_section(name, lines) for name, lines in sections.items()}


def _parse_section(name: str, lines: list[str]) -> Listing:
    """Parse the lines of one text section; ``name`` is its function."""
    rows: list[Row] = []
    labels: dict[str, int] = {}
    pending_labels: list[str] = []
    columns: dict[int, Register] = {}
    group_line: str | None = None
    first: tuple[int, str, int] | None = None  # offset, text, low half of the word
    for line in lines:
        if first is not None:
            second = _SECOND_LINE.match(line)
            if second is None:
                raise BadBinary(
                    f"nvdisasm printed {line.strip()[:60]!r} inside an instruction of "
                    f".text.{name}; its version may be unsupported"
                )
            defs, uses = _register_marks(line, columns)
            word = first[2] | int(second[1], 16) << 64
            rows.append(Row(first[0], first[1], word, defs, uses))
            first = None
            continue
        start = _FIRST_LINE.match(line)
        if start is not None:
            first = (int(start[1], 16), start[2].rstrip(" ;"), int(start[3], 16))
            for label in pending_labels:
                labels[label] = first[0]
            pending_labels = []
            continue
        match = _LABEL.match(line)
        is_table_line = "// |" in line and not line.lstrip().startswith("/*")
        if match:
            pending_labels.append(match[1])
        elif is_table_line and ("GPR" in line or "PRED" in line):
            group_line = line
        elif is_table_line and "#" in line and group_line is not None:
            columns = _register_columns(group_line, line)
    end = rows[-1].offset + 16 if rows else 0
    labels.update(dict.fromkeys(pending_labels, end))
    return Listing(name, tuple(rows), labels)


def _register_columns(group_line: str, digit_line: str) -> dict[int, Register]:
    """Map each character column to its register, from the two header lines of the marks.

    ``group_line`` has the names of the column groups, ``digit_line`` the last digits of the
    register numbers.
    """
    columns: dict[int, Register] = {}
    start = group_line.index("// |") + 4
    while (end := group_line.find("|", start)) >= 0:
        file = REGISTER_FILES.get(group_line[start:end].strip())
        zero = digit_line.find("0", digit_line.find("#", start, end), end)
        if file is not None and zero >= 0:
            columns.update((at, (file, at - zero)) for at in range(zero, end))
        start = end + 1
    return columns


def _register_marks(
    line: str, columns: dict[int, Register]
) -> tuple[tuple[Register, ...], tuple[Register, ...]]:
    """The registers that a line marks as defined, and those that it marks as used."""
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
