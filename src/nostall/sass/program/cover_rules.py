"""In-order rules: what the scoreboard of one instruction proves about earlier ones of its unit.

Variable-latency units work through queues, and compilers rely on their order.  No manual states
these rules.  Each row of ``RULES`` is one that compiler output needs: a kernel of the corpus is
rejected without it (``python -m benchmarks run sass.cover_rules`` lists the kernels, and a test
checks one witness for each rule).  An order that no compiler output needs is not assumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

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
    claim: Claim
    earlier: frozenset[str]
    """Groups of the earlier instruction (see :func:`group`)."""
    later: frozenset[str]
    """Groups of the later instruction."""
    guarded: bool = False
    """Whether the rule is about later instructions with a guard, which may be false.  The other
    rules of claim RESULT and SOURCES are about later instructions that execute whenever the
    earlier one does: without a guard, or with the same guard."""
    architectures: frozenset[int] | None = None
    """Architectures on which compilers rely on the rule; None means all."""


_FUNCTIONS = frozenset(("MUFU", "F2F", "F2I", "I2F", "I2I", "FRND", "FCHK"))
_BIT_COUNTS = frozenset(("POPC", "FLO", "BREV"))
_MEMORY = "LDG STG LDL STL LDS STS LDSM STSM SHFL LDGSTS ATOMS RED REDG ATOMG"
"""Load/store instructions that read their sources in order."""
_OWN_GROUP = frozenset(
    (*_MEMORY.split(), "REDUX", "S2UR", "ATOM", "BAR", "LDTM", "STTM", "UTMALDG")
)


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
        return base
    if base in _FUNCTIONS:
        if "F64" in modifiers:
            return "double-conversions"
        return "" if modifiers & {"S64", "U64"} else "functions"
    if base in _BIT_COUNTS:
        return "bit-counts"
    units = {Pipe.DOUBLE: "double", Pipe.MMA: "double-matrix", Pipe.TEXTURE: "texture"}
    return units.get(pipe, "")


def _rule(
    name: str,
    claim: Claim,
    earlier: str,
    later: str = "",
    *,
    guarded: bool = False,
    architectures: Iterable[int] = (),
) -> CoverRule:
    """A rule; groups are separated by spaces, and without ``later`` both sides are equal."""
    first, second = frozenset(earlier.split()), frozenset((later or earlier).split())
    return CoverRule(name, claim, first, second, guarded, frozenset(architectures) or None)


RULES: tuple[CoverRule, ...] = (
    _rule("LDS after LDS", Claim.RESULT, "LDS"),
    _rule("LDSM after LDS", Claim.RESULT, "LDS", "LDSM"),
    _rule("SHFL after LDS", Claim.RESULT, "LDS", "SHFL"),
    _rule("LDS after LDSM", Claim.RESULT, "LDSM", "LDS"),
    _rule("LDSM after LDSM", Claim.RESULT, "LDSM"),
    _rule("SHFL after LDSM", Claim.RESULT, "LDSM", "SHFL"),
    _rule("LDS after SHFL", Claim.RESULT, "SHFL", "LDS"),
    _rule("SHFL after SHFL", Claim.RESULT, "SHFL"),
    _rule("ATOMS", Claim.RESULT, "ATOMS"),
    _rule("REDUX", Claim.RESULT, "REDUX"),
    _rule("functions and conversions", Claim.RESULT, "functions"),
    _rule("double conversions", Claim.RESULT, "double-conversions"),
    _rule("bit counts", Claim.RESULT, "bit-counts"),
    _rule("S2UR", Claim.RESULT, "S2UR"),
    _rule("double arithmetic", Claim.RESULT, "double"),
    _rule("double matrix", Claim.RESULT, "double-matrix"),
    _rule("texture", Claim.RESULT, "texture"),
    _rule("loads from tensor memory", Claim.RESULT, "LDTM"),
    _rule("guarded LDS", Claim.RESULT, "LDS", guarded=True),
    _rule("guarded functions", Claim.RESULT, "functions", guarded=True),
    _rule("guarded double arithmetic", Claim.RESULT, "double", guarded=True),
    _rule("sources of memory accesses", Claim.SOURCES, _MEMORY),
    _rule("sources of functions", Claim.SOURCES, "functions"),
    _rule("sources of double conversions", Claim.SOURCES, "double-conversions"),
    _rule("sources of bit counts", Claim.SOURCES, "bit-counts"),
    _rule("sources of double arithmetic", Claim.SOURCES, "double"),
    _rule("sources of double matrix", Claim.SOURCES, "double-matrix"),
    _rule("sources of STTM", Claim.SOURCES, "STTM", "STTM LDTM"),
    _rule("sources, guarded UTMALDG", Claim.SOURCES, "UTMALDG", guarded=True),
    _rule("sources, guarded LDG", Claim.SOURCES, "LDG", guarded=True),
    _rule("sources, guarded LDS", Claim.SOURCES, "LDS STS STG", "LDS", guarded=True),
    _rule("sources, guarded STG", Claim.SOURCES, "LDS LDSM STS STSM STG", "STG", guarded=True),
    _rule("sources, guarded STL", Claim.SOURCES, "STL STG", "STL", guarded=True),
    _rule("sources, guarded LDGSTS", Claim.SOURCES, "LDGSTS", guarded=True),
    _rule("sources, guarded functions", Claim.SOURCES, "functions", guarded=True),
    _rule("sources, guarded double", Claim.SOURCES, "double", guarded=True),
    _rule("LDSM over LDSM", Claim.OVERWRITES_RESULT, "LDSM"),
    _rule("SHFL over SHFL", Claim.OVERWRITES_RESULT, "SHFL"),
    _rule("functions over functions", Claim.OVERWRITES_RESULT, "functions"),
    _rule("double over double", Claim.OVERWRITES_RESULT, "double"),
    _rule("LDTM over LDTM", Claim.OVERWRITES_RESULT, "LDTM"),
    _rule("memory result over sources", Claim.OVERWRITES_SOURCES, _MEMORY),
    _rule("function over sources", Claim.OVERWRITES_SOURCES, "functions"),
    _rule("double conversion over sources", Claim.OVERWRITES_SOURCES, "double-conversions"),
    _rule("bit count over sources", Claim.OVERWRITES_SOURCES, "bit-counts"),
    _rule("double over sources", Claim.OVERWRITES_SOURCES, "double"),
    _rule("LDTM over sources", Claim.OVERWRITES_SOURCES, "STTM", "LDTM"),
    _rule("blocking BAR", Claim.DRAINS_SOURCES, _MEMORY, "BAR", architectures=(75,)),
    _rule("texture, DEPBAR with a count", Claim.PARTIAL_WAIT, "texture"),
    _rule("ATOM of emulated halves", Claim.READ_PROVES_RESULT, "ATOM"),
)
"""All in-order rules."""


_NONE: frozenset[str] = frozenset()


class CoverTable:
    """A set of rules in the form that the analyses look up."""

    def __init__(self, rules: Iterable[CoverRule] = RULES) -> None:
        self.rules = tuple(rules)
        self._cached: dict[tuple[Claim, str, bool, int], frozenset[str]] = {}

    def without(self, name: str) -> CoverTable:
        """A table without one rule; raises KeyError if there is no rule of this name."""
        rest = [rule for rule in self.rules if rule.name != name]
        if len(rest) == len(self.rules):
            raise KeyError(f"no cover rule {name!r}; known are {[r.name for r in self.rules]}")
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
                and group in r.later
                and r.guarded == guarded
                and (r.architectures is None or sm in r.architectures)
            )
            found = self._cached[key] = _NONE.union(*(rule.earlier for rule in rules))
        return found


COVER = CoverTable()
"""The table of all rules."""
