"""Which further in-order rules compiler output needs that the verifier refuses.

    python -m benchmarks run sass.cover_gaps --out benchmarks/sass/results/cover_gaps.json

Each function of the whole corpus is validated with the present rules.  For each refused function
the fewest further rules that make it accepted are found: a rule for each pair of groups of one
unit.  ``--wheels`` does the same for a sample of the functions in mined wheels.  The result is the
smallest set of rules that accepts all functions, with the functions that need each rule.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from tests.corpus import catalogue

from benchmarks.harness.result_file import save
from benchmarks.sass.verifier.library_functions import batches, draw, libraries, programs
from nostall.core.errors import BadBinary, NostallError
from nostall.sass import Program
from nostall.sass.program import Function
from nostall.sass.program.cover_rules import RULES, Claim, CoverRule, CoverTable, group
from nostall.sass.safety.hazards.dataflow import entry_states, find_conflicts, step_through
from nostall.sass.safety.hazards.facts import instruction_facts
from nostall.sass.safety.hazards.validator import HazardValidator
from nostall.sass.safety.latency import LatencyTable
from nostall.sass.safety.pairing import HazardKind

MAX_PAIRS = 400
"""Pairs of rules that are tried where one rule does not suffice."""
MAX_WITNESSES = 6
SAVE_SECONDS = 60

_CLAIMS = (
    Claim.SOURCES,
    Claim.OVERWRITES_SOURCES,
    Claim.OVERWRITES_RESULT,
    Claim.RESULT,
)
"""Claims of the candidates, the weakest first."""
_OTHER_UNITS = ("double-conversions", "bit-counts", "REDUX")
"""Groups that are not in the unit of the other groups of their pipe."""

RuleSet = frozenset[CoverRule]


@dataclass(frozen=True)
class Gap:
    """One refused function and the smallest sets of rules that make it accepted."""

    sm: int
    name: str
    size: int
    """Number of instructions."""
    sets: tuple[RuleSet, ...]
    """Empty if no further rule makes the function accepted."""
    findings: tuple[str, ...]


Missing = frozenset[tuple[HazardKind, str, str]]
"""(kind, group of the first instruction, group of the second) of conflicts without cover."""


class Coverage:
    """Checks one function against tables of in-order rules, and nothing else."""

    def __init__(self, function: Function, sm: int) -> None:
        self.function, self.sm = function, sm
        table = LatencyTable.load(sm)
        self._latencies = {i.index: table.max_latency(i) for i in function.instructions}

    def missing(self, rules: Sequence[CoverRule]) -> Missing:
        """The conflicts that remain with the present rules and some more."""
        order, cover = self.function.instructions, CoverTable((*RULES, *rules))
        facts = {
            i.index: instruction_facts(i, self.sm, self._latencies[i.index], cover) for i in order
        }
        entries = entry_states(self.function.blocks, order, facts)
        return frozenset(
            (conflict.kind, conflict.first.group, conflict.second.group)
            for block, state in zip(self.function.blocks, entries, strict=True)
            for current, in_flight, _ in step_through(state, block, order, facts)
            for conflict in find_conflicts(current, in_flight, facts)
            if not conflict.first.fixed_latency
        )

    def suffices(self, rules: Sequence[CoverRule]) -> bool:
        """Whether some more rules cover everything."""
        return not self.missing(rules)


_CLAIMS_OF_KIND: dict[HazardKind, tuple[Claim, ...]] = {
    "RAW": (Claim.RESULT,),
    "WAW": (Claim.OVERWRITES_RESULT, Claim.RESULT),
    "WAR": (Claim.SOURCES, Claim.OVERWRITES_SOURCES, Claim.RESULT),
}
_BY_OVERWRITE = (Claim.OVERWRITES_RESULT, Claim.OVERWRITES_SOURCES)


def candidates(function: Function, sm: int, missing: Missing) -> list[CoverRule]:
    """Rules between groups of one unit that may cover ``missing``, the weakest claims first."""
    units: dict[str, str] = {}
    setters: set[str] = set()
    for instruction in function.instructions:
        if name := group(instruction, sm):
            units[name] = name if name in _OTHER_UNITS else str(instruction.pipe)
            if instruction.control.write_sb < 6 or instruction.control.read_sb < 6:
                setters.add(name)
    keys: set[tuple[Claim, str, str]] = set()
    for kind, first, second in missing:
        for claim in _CLAIMS_OF_KIND[kind] if first else ():
            if claim in _BY_OVERWRITE:
                later = {second} if second else set()
            else:
                later = setters
            keys |= {(claim, first, g) for g in later if units[g] == units[first]}
    keys -= {(r.claim, r.earlier, r.later) for r in RULES}
    return _sorted(_rule(*key) for key in keys)


def _sorted(rules: Iterable[CoverRule]) -> list[CoverRule]:
    """Rules with the weakest claims first."""
    return sorted(rules, key=lambda rule: (_CLAIMS.index(rule.claim), rule.name))


def _rule(claim: Claim, earlier: str, later: str) -> CoverRule:
    return CoverRule(f"{claim.value}: {earlier} before {later}", claim, earlier, later)


def gap(function: Function, sm: int, name: str, known: RuleSet = frozenset()) -> Gap | None:
    """The rules that a function lacks; None if it is accepted.

    ``known``: rules that other functions lack; no others are tried where these suffice.
    """
    findings = HazardValidator(sm).check(function)
    if not findings:
        return None
    texts = tuple(f"{f.kind} {f.offset:#x}: {f.instruction}: {f.reason}" for f in findings)
    sets = smallest_sets(Coverage(function, sm), known)
    return Gap(sm, name, len(function.instructions), sets, texts[:3])


def smallest_sets(coverage: Coverage, known: RuleSet) -> tuple[RuleSet, ...]:
    """The smallest sets of further rules that cover all results and sources; () if none does."""
    missing = coverage.missing(())
    if known and missing and coverage.suffices(tuple(known)):
        return (frozenset(_without_needless(coverage, _sorted(known))),)
    rules = candidates(coverage.function, coverage.sm, missing)
    if not missing or not coverage.suffices(rules):
        return ()
    found = [frozenset((rule,)) for rule in rules if coverage.suffices((rule,))]
    if found:
        return tuple(found)
    needed = _without_needless(coverage, rules)
    pairs = list(combinations(rules, 2)) if len(needed) == 2 else []
    found = [
        frozenset(pair) for pair in pairs if len(pairs) <= MAX_PAIRS and coverage.suffices(pair)
    ]
    return tuple(found) or (frozenset(needed),)


def _without_needless(coverage: Coverage, rules: list[CoverRule]) -> list[CoverRule]:
    """A part of ``rules`` that suffices and of which none can go; strong claims go first."""
    needed, width = list(rules), max(1, len(rules) // 2)
    while True:
        at = len(needed)
        while at > 0:
            rest = needed[: max(0, at - width)] + needed[at:]
            if coverage.suffices(rest):
                needed = rest
            at -= width
        if width == 1:
            return needed
        width = max(1, width // 2)


def choose(gaps: Sequence[Gap]) -> RuleSet:
    """Few rules that make all functions accepted: the set that most functions share first."""
    chosen: set[CoverRule] = set()
    remaining = [gap for gap in gaps if gap.sets]
    while remaining:
        remaining = [gap for gap in remaining if not any(s <= chosen for s in gap.sets)]
        counts = Counter(s - chosen for gap in remaining for s in gap.sets)
        if not counts:
            break
        best = min(counts, key=lambda s: (len(s), -counts[s], _strength(s)))
        chosen |= best
    return frozenset(chosen)


def _strength(rules: RuleSet) -> tuple[int, list[str]]:
    return sum(_CLAIMS.index(rule.claim) for rule in rules), sorted(rule.name for rule in rules)


def corpus_gaps(paths: Sequence[Path], jobs: int) -> Iterator[Gap | None]:
    """The gap of each function of some cubins, or None if it is accepted."""
    if jobs == 1:
        for path in paths:
            yield from cubin_gaps(path)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for gaps in pool.map(cubin_gaps, paths):
            yield from gaps


def cubin_gaps(path: Path) -> list[Gap | None]:
    """The gap of each function of one cubin; none if nostall cannot read it."""
    name = str(path.relative_to(catalogue.ROOT))
    try:
        program = Program.from_cubin(path.read_bytes())
    except BadBinary:
        return []
    return [gap(f, program.sm, f"{name}:{f.name}") for f in program.functions]


def library_gaps(options: argparse.Namespace) -> Iterator[Gap | None]:
    """The same for a sample of the functions of mined wheels."""
    options.state.mkdir(parents=True, exist_ok=True)
    names = draw(options.wheels, libraries("mined"), options.state, options.limit, options.max_size)
    for library, functions in batches(list(names), options.state, set()):
        for program in programs(functions):
            if not isinstance(program, NostallError):
                function = program.functions[0]
                yield gap(function, program.sm, f"{library}:{function.name}")


def report(out: Path, functions: int, gaps: Sequence[Gap]) -> None:
    """Print the rules that the functions need, and write the file."""
    chosen = choose(gaps)
    records = []
    for rule in sorted(chosen, key=lambda r: r.name):
        needs = [g for g in gaps if g.sets and all(rule in s for s in g.sets if s <= chosen)]
        needs.sort(key=lambda g: g.size)
        alternatives = [g for g in needs if sum(len(s) == len(g.sets[0]) for s in g.sets) > 1]
        records.append(
            {
                "rule": rule.name,
                "functions_that_need_it": len(needs),
                "functions_with_alternatives": len(alternatives),
                "architectures": sorted({g.sm for g in needs}),
                "witnesses": [f"sm_{g.sm} {g.name}" for g in needs[:MAX_WITNESSES]],
            }
        )
        record = records[-1]
        print(
            f"{rule.name:55} {record['functions_that_need_it']:4}"
            f" ({record['functions_with_alternatives']} with alternatives)"
            f" {record['architectures']} {record['witnesses'][:1]}"
        )
    others = [
        {"function": f"sm_{g.sm} {g.name}", "instructions": g.size, "findings": g.findings}
        for g in gaps
        if not g.sets
    ]
    print(f"{functions} functions, {len(gaps)} refused, {len(others)} not by order", flush=True)
    save(out, functions=functions, refused=len(gaps), rules=records, other_refusals=others)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wheels", type=Path, help="a folder of mined wheels, instead of corpus")
    parser.add_argument("--state", type=Path, help="a folder for the functions of the wheels")
    parser.add_argument("--limit", type=int, default=300, help="functions by library and sm")
    parser.add_argument("--max-size", type=int, default=600, help="instructions of a function")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes that read the corpus")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> int:
    """Find the gaps; returns 1 if a function is refused."""
    began = saved = time.monotonic()
    os.nice(5)
    by_size = sorted(catalogue.corpus(), key=lambda path: path.stat().st_size)
    results = library_gaps(options) if options.wheels else corpus_gaps(by_size, options.jobs)
    functions, gaps = 0, list[Gap]()
    for result in results:
        functions += 1
        if result is not None:
            gaps.append(result)
        if time.monotonic() - saved > SAVE_SECONDS:
            report(options.out, functions, gaps)
            saved = time.monotonic()
        if time.monotonic() - began > options.seconds:
            break
    report(options.out, functions, gaps)
    return 1 if gaps else 0
