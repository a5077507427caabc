"""In-order rules: what the scoreboard of one instruction proves about earlier ones of its queue.

Variable-latency units work through queues, and compilers rely on their order.  No manual states
these rules.  A rule is about a whole queue: if compiler output needs the order of some of its
instructions, the order of all of them is assumed.  Which pairs occur is a matter of the program.
``python -m benchmarks run sass.cover_rules`` lists the kernels that are rejected without each rule.

Whole queues serve to accept compiler output.  A candidate may rely on the order of two groups only
if the pair has *witnesses* (:data:`WITNESSED`), or if its original relies on the same instructions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib import resources
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
    READ_PROVES_PREDICATE = "read proves predicate"
    """The read scoreboard is released after the success predicate is written."""


@dataclass(frozen=True, slots=True)
class CoverRule:
    """One in-order rule between two groups of instructions."""

    name: str
    """The order and the queue: all pairs of a queue share their evidence."""
    claim: Claim
    earlier: str
    """Group of the earlier instruction (see :func:`group`)."""
    later: str
    """Group of the later instruction."""
    architectures: frozenset[int] | None = None
    """Architectures on which compilers rely on the rule; None means all."""
    order: Claim | None = None
    """The order from which the claim follows; None: the one that is about the same registers."""

    @property
    def pair(self) -> OrderedPair:
        """The order from which the claim follows, with its groups."""
        order = self.order or _ORDER_OF.get(self.claim, self.claim)
        return OrderedPair(order, self.earlier, self.later)


class OrderedPair(NamedTuple):
    """The order of two groups of one queue."""

    order: Claim
    """RESULT, SOURCES or a claim that is an order of its own."""
    earlier: str
    later: str


_ORDER_OF = {
    Claim.OVERWRITES_RESULT: Claim.RESULT,
    Claim.OVERWRITES_SOURCES: Claim.SOURCES,
}
"""Claims that follow from an order: an instruction writes its result after it reads its sources."""


_FUNCTIONS = frozenset(("MUFU", "F2F", "F2I", "I2F", "I2I", "FRND", "FCHK"))
_BIT_COUNTS = frozenset(("POPC", "FLO", "BREV"))
_OPCODES = (
    "LDG STG LDL STL LDS STS LDSM STSM SHFL MOVM LDGSTS ATOMS ATOMG RED REDUX ATOM S2UR BAR LDTM "
    "STTM UTMALDG UTMASTG UTMAPF SYNCS LD ST"
)
_TENSOR_CORE = "UTCHMMA UTCQMMA UTCIMMA UTCOMMA UTCMXQMMA UTCBAR UTCCP UTCSHIFT"
_OWN_GROUP = (
    {name: name for name in _OPCODES.split()}
    | {"REDG": "RED"}
    | dict.fromkeys(_TENSOR_CORE.split(), "tensor-core")
)
"""Opcode -> group, for opcodes whose group does not depend on their modifiers."""


def group(instruction: Instruction, sm: int) -> str:
    """The group of an instruction in the rules, or "" if no rule is about it.

    The group of an opcode of the load/store unit is the opcode.  Conversions with an FP64 operand
    and those with a 64-bit integer have groups of their own, and so have bit counts, although one
    unit executes them: witnesses are counted by pairs of groups.
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
        return "wide-conversions" if modifiers & {"S64", "U64"} else "functions"
    if base in _BIT_COUNTS:
        return "bit-counts"
    units = {Pipe.DOUBLE: "double", Pipe.MMA: "double-matrix", Pipe.TEXTURE: "texture"}
    return units.get(pipe, "")


_LOAD_STORE = "LDG LDGSTS STG LDL STL LD ST LDS STS LDSM STSM SHFL ATOM ATOMG ATOMS RED"

_SOURCES_IN_ORDER = {
    "load/store unit": _LOAD_STORE,
    "transcendental unit": "functions double-conversions wide-conversions bit-counts",
    "double": "double",
    "double-matrix": "double-matrix",
    "texture": "texture",
    "warp reductions": "REDUX",
    "tensor memory": "LDTM STTM",
    "tensor core": "tensor-core",
    "bulk copies": "UTMALDG UTMASTG UTMAPF",
    "mbarriers": "SYNCS",
}
"""Queue -> the groups that go through it.  A queue reads the sources of its instructions in issue
order.  Compiler output needs some pairs of each queue; which ones is a matter of the program.  On
an H200 the load/store unit kept this order in each pair that was tried, with a false guard too
(``benchmarks/sass/results/witnesses.json.gz``)."""

_RESULTS_IN_ORDER = {
    "shared memory": "LDS LDSM SHFL MOVM ATOMS",
    "warp reductions": "REDUX",
    "transcendental unit": "functions double-conversions wide-conversions bit-counts",
    "uniform special registers": "S2UR",
    "double": "double",
    "double-matrix": "double-matrix",
    "texture": "texture",
    "tensor memory loads": "LDTM",
}
"""Queue -> the groups whose results it writes in issue order.  Loads from global and local memory
complete in any order, and no compiler output relies on an order of global atomics, REDUX, MATCH
and S2R with other results."""


def _queues(order: Claim, queues: dict[str, str], *implied: Claim) -> Iterator[CoverRule]:
    """The rules of some queues for one order: one for each pair of groups.

    A queue keeps the order of instructions whose guard is false, too.  ``implied``: what follows
    from the order.
    """
    for name, groups in queues.items():
        for claim in (order, *implied):
            for later in groups.split():
                for earlier in groups.split():
                    yield CoverRule(f"{order.value}: {name}", claim, earlier, later, order=order)


_BLOCKING_BAR = frozenset((75, 80, 86, 89))
"""Architectures on which ptxas relies on BAR to wait for sources; it does so up to CUDA 12.1."""

RULES: tuple[CoverRule, ...] = (
    # An instruction writes its result after it has read its sources.
    *_queues(Claim.RESULT, _RESULTS_IN_ORDER, Claim.OVERWRITES_RESULT, Claim.OVERWRITES_SOURCES),
    *_queues(Claim.SOURCES, _SOURCES_IN_ORDER, Claim.OVERWRITES_SOURCES),
    # A BAR that blocks at once issues after earlier sources are read.
    *(
        CoverRule(
            f"{Claim.DRAINS_SOURCES.value}: load/store unit before BAR",
            Claim.DRAINS_SOURCES,
            earlier,
            "BAR",
            _BLOCKING_BAR,
        )
        for earlier in _LOAD_STORE.split()
    ),
    *_queues(Claim.PARTIAL_WAIT, {"texture": "texture"}),
    *_queues(Claim.READ_PROVES_PREDICATE, {"ATOM": "ATOM"}),
)
"""All in-order rules."""


def ordered_pairs() -> frozenset[OrderedPair]:
    """The pairs whose order a candidate may rely on only with witnesses.

    The other two claims are about one group, and candidates use them as compilers do.
    """
    alone = (Claim.PARTIAL_WAIT, Claim.READ_PROVES_PREDICATE)
    return frozenset(rule.pair for rule in RULES if rule.claim not in alone)


LEAST_WITNESSES = 3
"""Functions of compiler output that must need the order of a pair."""


def _witnessed_pairs(count: str) -> frozenset[OrderedPair]:
    """The pairs whose order at least ``LEAST_WITNESSES`` functions of compiler output need.

    ``count``: "functions", or "guarded" for those in which only later instructions with a guard
    prove something.  ``python -m benchmarks run sass.witnessed_pairs`` counts them.
    """
    text = resources.files("nostall.sass.program").joinpath("witnessed_pairs.json").read_text()
    return frozenset(
        OrderedPair(Claim(row["order"]), row["earlier"], row["later"])
        for row in json.loads(text)["pairs"]
        if row.get(count, 0) >= LEAST_WITNESSES
    )


WITNESSED = _witnessed_pairs("functions")
"""The pairs on whose order a candidate may rely."""

WITNESSED_GUARDED = _witnessed_pairs("guarded")
"""The pairs on whose order a candidate may rely if the later instruction has a guard.

A guard that is false in all threads may let the later instruction pass the queue."""


_NONE: frozenset[str] = frozenset()


class Proofs(NamedTuple):
    """The groups of earlier instructions about which one instruction proves something."""

    results: frozenset[str]
    """Their results are written when its write scoreboard is released."""
    sources: frozenset[str]
    """Their sources are read when one of its scoreboards is released."""
    overwrites_results: frozenset[str]
    """Their results are written before its own."""
    overwrites_sources: frozenset[str]
    """Their sources are read before its result is written."""
    in_order: frozenset[str]
    """They complete before it does."""
    drained: frozenset[str]
    """Their sources are read when it has issued."""


NO_PROOFS = Proofs(*[_NONE] * 6)


class CoverTable:
    """A set of rules in the form that the analyses look up."""

    def __init__(
        self,
        rules: Iterable[CoverRule] = RULES,
        witnessed: Set[OrderedPair] = WITNESSED,
        guarded: Set[OrderedPair] = WITNESSED_GUARDED,
    ) -> None:
        """``witnessed``: the pairs on whose order a candidate may rely.

        ``guarded``: those of them for which the later instruction may have a guard.
        """
        self.rules = tuple(rules)
        self.witnessed, self.guarded = witnessed, guarded
        self._cached: dict[tuple[Claim, str, int, bool, bool], frozenset[str]] = {}
        self._proofs: dict[tuple[str, int, bool, bool], Proofs] = {}

    def without(self, name: str) -> CoverTable:
        """A table without the rules of one name; raises KeyError if there is none."""
        rest = [rule for rule in self.rules if rule.name != name]
        if len(rest) == len(self.rules):
            raise KeyError(
                f"no cover rule {name!r}; known are {sorted({r.name for r in self.rules})}"
            )
        return CoverTable(rest, self.witnessed, self.guarded)

    def earlier_groups(
        self, claim: Claim, group: str, sm: int, *, witnessed: bool, guarded: bool = False
    ) -> frozenset[str]:
        """The groups of earlier instructions about which one of ``group`` proves ``claim``.

        ``witnessed``: those of the pairs with witnesses, or those of the other pairs.  ``guarded``:
        whether the later instruction has a guard; what it overwrites does not depend on that.
        """
        if not group:
            return _NONE
        key = (claim, group, sm, witnessed, guarded)
        known = self.witnessed
        if guarded and claim in (Claim.RESULT, Claim.SOURCES):
            known = known & self.guarded
        found = self._cached.get(key)
        if found is None:
            rules = (
                r
                for r in self.rules
                if r.claim is claim
                and group == r.later
                and (r.architectures is None or sm in r.architectures)
                and (r.pair in known) == witnessed
            )
            found = frozenset(rule.earlier for rule in rules)
            if not witnessed:  # another order of the two may have witnesses
                found -= self.earlier_groups(claim, group, sm, witnessed=True, guarded=guarded)
            self._cached[key] = found
        return found

    def proofs(self, group: str, sm: int, *, witnessed: bool, guarded: bool = False) -> Proofs:
        """All that an instruction of ``group`` proves by pairs with or without witnesses.

        ``guarded``: whether the instruction has a guard.
        """
        if not group:
            return NO_PROOFS
        key = (group, sm, witnessed, guarded)
        found = self._proofs.get(key)
        if found is None:
            claims = (
                Claim.RESULT,
                Claim.SOURCES,
                Claim.OVERWRITES_RESULT,
                Claim.OVERWRITES_SOURCES,
                Claim.PARTIAL_WAIT,
                Claim.DRAINS_SOURCES,
            )
            found = self._proofs[key] = Proofs(
                *(
                    self.earlier_groups(claim, group, sm, witnessed=witnessed, guarded=guarded)
                    for claim in claims
                )
            )
        return found


COVER = CoverTable()
"""The table of all rules."""
