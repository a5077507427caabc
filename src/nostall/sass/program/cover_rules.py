"""In-order rules: what the scoreboard of one instruction proves about earlier ones of its unit.

Variable-latency units work through queues, and compilers rely on their order.  No manual states
these rules.  Each name in ``RULES`` is a rule that compiler output needs: a kernel of the corpus is
rejected without it (``python -m benchmarks run sass.cover_rules`` lists the kernels).  An order
that no compiler output needs is not assumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe


class Claim(StrEnum):
    """What a rule says about an earlier and a later instruction."""

    RESULT = "result"
    """The later one's write scoreboard is released after the earlier one's result is written."""
    SOURCES = "sources"
    """The later one's scoreboards are released after the earlier one's sources are read."""
    OVERWRITES_RESULT = "overwrites result"
    """The later one's result is written after the earlier one's."""
    OVERWRITES_SOURCES = "overwrites sources"
    """The later one's result is written after the earlier one's sources are read."""
    DRAINS_SOURCES = "drains sources"
    """The later one issues after the earlier one's sources are read, without a wait."""
    PARTIAL_WAIT = "partial wait"
    """The operations complete in order, so DEPBAR with a count proves all but the last ones."""
    READ_PROVES_RESULT = "read proves result"
    """Without a write scoreboard, the read scoreboard is released after the result is written."""


@dataclass(frozen=True, slots=True)
class CoverRule:
    """One in-order rule between two groups of instructions."""

    name: str
    """Pairs that share their evidence have the same name."""
    claim: Claim
    earlier: str
    """Group of the earlier instruction (see :func:`group`)."""
    later: str
    """Group of the later instruction."""
    guarded: bool = False
    """Whether the rule is about all later instructions, those too whose guard may be false.  The
    other rules of claim RESULT and SOURCES are about later instructions that execute whenever the
    earlier one does: without a guard, or with the same guard."""
    architectures: frozenset[int] | None = None
    """Architectures on which compilers rely on the rule; None means all."""


_FUNCTIONS = frozenset(("MUFU", "F2F", "F2I", "I2F", "I2I", "FRND", "FCHK"))
_BIT_COUNTS = frozenset(("POPC", "FLO", "BREV"))
_OPCODES = (
    "LDG STG LDL STL LDS STS LDSM STSM SHFL LDGSTS ATOMS ATOMG RED REDUX ATOM S2UR BAR LDTM STTM "
    "UTMALDG LD ST"
)
_OWN_GROUP = {name: name for name in _OPCODES.split()} | {"REDG": "RED"}
"""Opcode -> group, for opcodes that share none with others."""


def group(instruction: Instruction, sm: int) -> str:
    """The group of an instruction in the rules, or "" if no rule is about it.

    The group of an opcode of the load/store unit is the opcode.  64-bit floating-point conversions
    are not in the group of the other conversions, because another unit executes them.
    """
    if instruction.has_fixed_latency(sm) and instruction.base != "BAR":
        return ""
    return _group(instruction.base, instruction.pipe, instruction.modifiers)


@lru_cache(1 << 12)
def _group(base: str, pipe: Pipe, modifiers: frozenset[str]) -> str:
    if base in _OWN_GROUP:
        return _OWN_GROUP[base]
    if base in _FUNCTIONS:
        if "F64" in modifiers:
            return "double-conversions"
        return "" if modifiers & {"S64", "U64"} else "functions"
    if base in _BIT_COUNTS:
        return "bit-counts"
    units = {Pipe.DOUBLE: "double", Pipe.MMA: "double-matrix", Pipe.TEXTURE: "texture"}
    return units.get(pipe, "")


def _pairs(
    claim: Claim,
    later: str,
    earlier: str,
    *,
    guarded: bool = False,
    architectures: Iterable[int] = (),
) -> tuple[CoverRule, ...]:
    """One rule for each group in ``earlier`` (separated by spaces) with the group ``later``."""
    where = frozenset(architectures) or None
    prefix = "guarded " if guarded else ""
    return tuple(
        CoverRule(
            f"{claim.value}: {first} before {prefix}{later}", claim, first, later, guarded, where
        )
        for first in earlier.split()
    )


_QUEUE = "STG STL LDS STS LDSM STSM"
"""Groups whose instructions read their sources in issue order, whichever of them come after each
other: they go through one queue.  Compiler output needs most of the pairs, on all architectures;
which ones occur is a matter of the program.  SHFL is not among them: no compiler output shows that
it reads its sources before a later store or LDSM does."""


_GLOBAL_LOADS = "LDG LDGSTS"
"""Loads from global memory: one queue, too.  Which pairs occur is a matter of the program."""


def _queue(claim: Claim, later: str, earlier: str, queue: str) -> tuple[CoverRule, ...]:
    """One rule, of a pair for each group in ``later`` and each group in ``earlier``.

    It holds where the later instruction is guarded, too: an instruction whose guard is false goes
    through the queue.
    """
    return tuple(
        CoverRule(f"{claim.value}: {queue}", claim, first, last, guarded=True)
        for last in later.split()
        for first in earlier.split()
    )


def _drains(later: str, earlier: str, architectures: Iterable[int]) -> tuple[CoverRule, ...]:
    """One rule: an instruction issues after the sources of the load/store unit are read."""
    name = f"{Claim.DRAINS_SOURCES.value}: load/store unit before {later}"
    where = frozenset(architectures)
    return tuple(
        CoverRule(name, Claim.DRAINS_SOURCES, first, later, architectures=where)
        for first in earlier.split()
    )


RULES: tuple[CoverRule, ...] = (
    # Results that are written in issue order.
    *_pairs(Claim.RESULT, "LDS", "LDS LDSM SHFL"),
    *_pairs(Claim.RESULT, "LDSM", "LDS LDSM"),
    *_pairs(Claim.RESULT, "SHFL", "LDS LDSM SHFL"),
    *_pairs(Claim.RESULT, "ATOMS", "ATOMS"),
    *_pairs(Claim.RESULT, "REDUX", "REDUX"),
    *_pairs(Claim.RESULT, "functions", "functions"),
    *_pairs(Claim.RESULT, "double-conversions", "double-conversions"),
    *_pairs(Claim.RESULT, "bit-counts", "bit-counts"),
    *_pairs(Claim.RESULT, "S2UR", "S2UR"),
    *_pairs(Claim.RESULT, "double", "double"),
    *_pairs(Claim.RESULT, "double-matrix", "double-matrix"),
    *_pairs(Claim.RESULT, "texture", "texture"),
    *_pairs(Claim.RESULT, "LDTM", "LDTM"),
    *_pairs(Claim.RESULT, "LDS", "LDS", guarded=True),
    *_pairs(Claim.RESULT, "functions", "functions", guarded=True),
    *_pairs(Claim.RESULT, "double", "double", guarded=True),
    # Sources that are read in issue order.
    *_queue(Claim.SOURCES, _QUEUE, _QUEUE, "load/store queue"),
    *_queue(Claim.SOURCES, _GLOBAL_LOADS, _GLOBAL_LOADS, "global loads"),
    *_pairs(Claim.SOURCES, "SHFL", "SHFL LDS STS STL"),
    *_pairs(Claim.SOURCES, "LDS", "SHFL"),
    *_pairs(Claim.SOURCES, "ST", "ST"),
    *_pairs(Claim.SOURCES, "LD", "LD"),
    *_pairs(Claim.SOURCES, "STS", "ATOMS"),
    *_pairs(Claim.SOURCES, "LDL", "LDL"),
    *_pairs(Claim.SOURCES, "ATOMS", "ATOMS"),
    *_pairs(Claim.SOURCES, "ATOMG", "RED"),
    *_pairs(Claim.SOURCES, "functions", "functions"),
    *_pairs(Claim.SOURCES, "double-conversions", "double-conversions"),
    *_pairs(Claim.SOURCES, "bit-counts", "bit-counts"),
    *_pairs(Claim.SOURCES, "double", "double"),
    *_pairs(Claim.SOURCES, "double-matrix", "double-matrix"),
    *_pairs(Claim.SOURCES, "STTM", "STTM"),
    *_pairs(Claim.SOURCES, "LDTM", "STTM"),
    *_pairs(Claim.SOURCES, "ATOMG", "STG", guarded=True),
    *_pairs(Claim.SOURCES, "UTMALDG", "UTMALDG", guarded=True),
    # Results that are written after those of earlier instructions.
    *_pairs(Claim.OVERWRITES_RESULT, "LDSM", "LDSM"),
    *_pairs(Claim.OVERWRITES_RESULT, "SHFL", "SHFL"),
    *_pairs(Claim.OVERWRITES_RESULT, "functions", "functions"),
    *_pairs(Claim.OVERWRITES_RESULT, "double", "double"),
    *_pairs(Claim.OVERWRITES_RESULT, "LDTM", "LDTM"),
    # Results that are written after the sources of earlier instructions are read.
    *_queue(Claim.OVERWRITES_SOURCES, "LDS LDSM", _QUEUE, "load/store queue"),
    *_pairs(Claim.OVERWRITES_SOURCES, "SHFL", "SHFL LDS STS STL STG"),
    *_pairs(Claim.OVERWRITES_SOURCES, "LDS", "SHFL"),
    *_queue(Claim.OVERWRITES_SOURCES, "LDG", _GLOBAL_LOADS, "global loads"),
    *_pairs(Claim.OVERWRITES_SOURCES, "LD", "LD"),
    *_pairs(Claim.OVERWRITES_SOURCES, "LDL", "LDG"),
    *_pairs(Claim.OVERWRITES_SOURCES, "functions", "functions"),
    *_pairs(Claim.OVERWRITES_SOURCES, "double-conversions", "double-conversions"),
    *_pairs(Claim.OVERWRITES_SOURCES, "bit-counts", "bit-counts"),
    *_pairs(Claim.OVERWRITES_SOURCES, "double", "double"),
    # A blocking BAR issues after earlier sources are read.
    *_drains("BAR", f"LDG SHFL {_QUEUE}", architectures=(75,)),
    *_pairs(Claim.PARTIAL_WAIT, "texture", "texture"),
    *_pairs(Claim.READ_PROVES_RESULT, "ATOM", "ATOM"),
)
"""All in-order rules."""


_NONE: frozenset[str] = frozenset()


class Proofs(NamedTuple):
    """The groups of earlier instructions about which one instruction proves something."""

    results: frozenset[str]
    """Their results are written when its write scoreboard is released."""
    sources: frozenset[str]
    """Their sources are read when one of its scoreboards is released."""
    results_same_guard: frozenset[str]
    """The same for earlier instructions with the same guard."""
    sources_same_guard: frozenset[str]
    overwrites_results: frozenset[str]
    """Their results are written before its own."""
    overwrites_sources: frozenset[str]
    """Their sources are read before its result is written."""
    in_order: frozenset[str]
    """They complete before it does."""


_NO_PROOFS = Proofs(*[_NONE] * 7)


class CoverTable:
    """A set of rules in the form that the analyses look up."""

    def __init__(self, rules: Iterable[CoverRule] = RULES) -> None:
        self.rules = tuple(rules)
        self._cached: dict[tuple[Claim, str, bool, int], frozenset[str]] = {}
        self._proofs: dict[tuple[str, bool, int], Proofs] = {}

    def without(self, name: str) -> CoverTable:
        """A table without the rules of one name; raises KeyError if there is none."""
        rest = [rule for rule in self.rules if rule.name != name]
        if len(rest) == len(self.rules):
            raise KeyError(
                f"no cover rule {name!r}; known are {sorted({r.name for r in self.rules})}"
            )
        return CoverTable(rest)

    def earlier_groups(
        self, claim: Claim, group: str, sm: int, *, guarded: bool = False
    ) -> frozenset[str]:
        """The groups of earlier instructions about which one of ``group`` proves ``claim``.

        ``guarded``: whether the later instruction may not execute although the earlier one does.
        This matters for the claims RESULT and SOURCES only.
        """
        if not group:
            return _NONE
        key = (claim, group, guarded, sm)
        found = self._cached.get(key)
        if found is None:
            rules = (
                r
                for r in self.rules
                if r.claim is claim
                and group == r.later
                and r.guarded >= guarded
                and (r.architectures is None or sm in r.architectures)
            )
            found = self._cached[key] = frozenset(rule.earlier for rule in rules)
        return found

    def proofs(self, group: str, sm: int, *, guarded: bool) -> Proofs:
        """All that an instruction of ``group`` proves; ``guarded``: whether it has a guard."""
        if not group:
            return _NO_PROOFS
        key = (group, guarded, sm)
        found = self._proofs.get(key)
        if found is None:
            found = self._proofs[key] = Proofs(
                self.earlier_groups(Claim.RESULT, group, sm, guarded=guarded),
                self.earlier_groups(Claim.SOURCES, group, sm, guarded=guarded),
                self.earlier_groups(Claim.RESULT, group, sm),
                self.earlier_groups(Claim.SOURCES, group, sm),
                self.earlier_groups(Claim.OVERWRITES_RESULT, group, sm),
                self.earlier_groups(Claim.OVERWRITES_SOURCES, group, sm),
                self.earlier_groups(Claim.PARTIAL_WAIT, group, sm),
            )
        return found


COVER = CoverTable()
"""The table of all rules."""
