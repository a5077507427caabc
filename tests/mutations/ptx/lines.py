"""Lines of compiler-written PTX, and edits of them.

This module uses neither the moves nor the validator, so that it cannot share their errors.  It
relies on the layout of Triton's and nvcc's output: one statement a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

_INSTRUCTION = re.compile(
    r"\s*(?:@(?P<guard>!?[\w%$]+)\s+)?(?P<opcode>[a-z]\w*(?:\.[\w:]+)*)(?P<operands>(?:\s[^;]*)?);"
    r"\s*(?://.*)?$"
)
_LABEL = re.compile(r"\s*(?P<name>[\w$]+):\s*(?://.*)?$")
_REGISTER = re.compile(r"%[a-zA-Z_]\w*")
_TABLE_ROW = re.compile(r"\s*(?:\.branchtargets\b.*|\$L__BB\w+\s*[,;]\s*)$")
_SPECIAL = ("%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "%clock", "%warpid", "%smid")


def words(text: str) -> frozenset[str]:
    """The words of a text as a set."""
    return frozenset(text.split())


_WRITES_NOTHING = words(
    "st red bar barrier cp fence membar bra brx ret exit call wgmma tcgen05 griddepcontrol "
    "prefetch nanosleep stmatrix trap sust tensormap setmaxnreg"
)
TERMINATORS = frozenset({"bra", "brx", "ret", "exit"})


@dataclass(frozen=True)
class Line:
    """One line of a PTX text."""

    text: str
    depth: int
    """Number of braces around it: 1 directly inside a function."""

    @cached_property
    def _match(self) -> re.Match[str] | None:
        return _INSTRUCTION.match(self.text)

    @property
    def opcode(self) -> str:
        """Opcode with its modifiers; empty if the line is no instruction."""
        return self._match["opcode"] if self._match else ""

    @property
    def root(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def guard(self) -> str:
        return (self._match["guard"] or "") if self._match else ""

    @property
    def operands(self) -> str:
        return self._match["operands"].strip() if self._match else ""

    @property
    def label(self) -> str:
        match = _LABEL.match(self.text)
        return match["name"] if match else ""

    @cached_property
    def written(self) -> frozenset[str]:
        """Registers of the destination."""
        if not self.opcode or self.root in _WRITES_NOTHING or self.operands.startswith("["):
            return frozenset()
        first = self.operands
        end = first.find("}") if first.startswith("{") else first.find(",")
        return _registers(first[: end + 1 if end >= 0 else None])

    @cached_property
    def read(self) -> frozenset[str]:
        """Registers of the guard and of the sources; of unclear instructions all that are named."""
        guard = _registers(self.guard)
        if self.root in ("wgmma", "tcgen05", "call"):
            return guard | _registers(self.operands)
        end = self.operands.find("}") if self.operands.startswith("{") else self.operands.find(",")
        has_destination = bool(self.written)
        sources = self.operands[end + 1 :] if has_destination and end >= 0 else self.operands
        if has_destination and end < 0:
            sources = ""
        return guard | _registers(sources) | (self.written if self.guard else frozenset())

    @property
    def named(self) -> frozenset[str]:
        return self.read | self.written


def _registers(text: str) -> frozenset[str]:
    return frozenset(r for r in _REGISTER.findall(text) if r not in _SPECIAL)


@dataclass(frozen=True)
class Text:
    """A PTX text as lines."""

    name: str
    lines: tuple[Line, ...]

    @classmethod
    def parse(cls, name: str, text: str) -> Text:
        depth = 0
        lines: list[Line] = []
        for line in text.split("\n"):
            code = line.split("//")[0]
            lines.append(Line(line, depth))
            if not code.lstrip().startswith(".file"):
                depth += code.count("{") - code.count("}")
        return cls(name, tuple(lines))

    def __str__(self) -> str:
        return "\n".join(line.text for line in self.lines)

    @cached_property
    def _targets(self) -> frozenset[str]:
        """Names in branches and in tables of targets."""
        jumps = (
            line.text.split("//")[0]
            for line in self.lines
            if line.root in TERMINATORS or _TABLE_ROW.match(line.text)
        )
        return frozenset(name for text in jumps for name in re.findall(r"[\w$]+", text))

    def is_target(self, label: str) -> bool:
        """Whether a branch or table names the label."""
        return label in self._targets

    @cached_property
    def target_labels(self) -> tuple[str, ...]:
        """The labels outside inner braces that a branch or table names."""
        return tuple(
            sorted({x.label for x in self.lines if x.depth == 1 and self.is_target(x.label)})
        )

    def is_free(self, moved: int, to: int) -> bool:
        """Whether a line depends on no register of the lines between it and ``to``, included."""
        line = self.lines[moved]
        first, last = min(moved, to), max(moved, to)
        return not any(
            other.written & line.named or other.read & line.written or (other.text[:1] == "{")
            for at, other in enumerate(self.lines[first : last + 1], first)
            if at != moved
        )

    @cached_property
    def regions(self) -> tuple[tuple[int, ...], ...]:
        """Positions of instructions that control passes one after another, outside inner braces."""
        regions: list[list[int]] = [[]]
        for at, line in enumerate(self.lines):
            code = line.text.split("//")[0].strip()
            # Two statements in a line, and statements of several lines.
            is_other = bool(code) and not (line.opcode or line.label or code.startswith("."))
            if line.depth == 0 or self.is_target(line.label) or is_other:
                regions.append([])
            elif line.opcode and line.depth == 1:
                if line.root in TERMINATORS:
                    regions.append([])
                else:
                    regions[-1].append(at)
        return tuple(tuple(r) for r in regions if len(r) > 1)

    def pairs(self, first: Test, second: Test, reach: int = 40) -> Iterator[tuple[int, int]]:
        """Positions (i, j) with i before j in one region, at most ``reach`` instructions apart."""
        for region in self.regions:
            for number, i in enumerate(region):
                if first(self.lines[i]):
                    for j in region[number + 1 : number + 1 + reach]:
                        if second(self.lines[j]):
                            yield i, j


Test = Callable[[Line], bool]
Lines = Sequence[str]


@dataclass(frozen=True)
class Change:
    """Changed lines of a text: replaced, removed or moved."""

    replaced: tuple[tuple[int, str], ...] = ()
    """(position, new text); several lines joined by newlines, or an empty text."""
    removed: tuple[int, ...] = ()
    moved: tuple[tuple[int, int], ...] = ()
    """(position, the position before which it stands after the move)."""

    def apply(self, text: Text) -> str:
        lines = [line.text for line in text.lines]
        for at, new in self.replaced:
            lines[at] = new
        order: list[str] = []
        before: dict[int, list[str]] = {}
        for source, target in self.moved:
            before.setdefault(target, []).append(lines[source])
        gone = {*self.removed, *(source for source, _ in self.moved)}
        for at in range(len(lines) + 1):
            order += before.get(at, [])
            if at < len(lines) and at not in gone:
                order.append(lines[at])
        return "\n".join(order)


def move_up(source: int, above: int) -> Change:
    """The line moves to directly above another."""
    return Change(moved=((source, above),))


def move_down(source: int, below: int) -> Change:
    """The line moves to directly below another."""
    return Change(moved=((source, below + 1),))


def replace(at: int, new: str) -> Change:
    return Change(replaced=((at, new),))


def exchange(text: Text, i: int, j: int) -> Change:
    """Two lines change places."""
    return Change(replaced=((i, text.lines[j].text), (j, text.lines[i].text)))
