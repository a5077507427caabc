"""Which in-order rules of the verifier compiler output needs, and which functions need them.

    python -m benchmarks run sass.cover_rules --out benchmarks/sass/results/cover_rules.json

Each function is validated with all rules, and once without each rule that it can use.  A function
needs a rule if it has more findings without it.  A rule that no function needs has no evidence.
``--files`` adds other cubins, for example of a library.  ``--rules`` examines some rules only and
keeps the records of the others in the file.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.corpus import catalogue

from benchmarks.harness.result_file import load, save
from nostall.core.errors import BadBinary
from nostall.sass import Program
from nostall.sass.program import Function, Instruction
from nostall.sass.program.cover_rules import COVER, RULES, Claim, CoverRule, group
from nostall.sass.safety.hazards.validator import HazardValidator

MAX_WITNESSES = 6
"""Smallest functions that are listed for each rule."""
MAX_INSTRUCTIONS = 8000
"""Larger functions are left out."""

Need = tuple[str, int, str, str, int]
"""(rule, architecture, cubin, function, number of instructions)."""


def usable_rules(
    function: Function, sm: int, rules: Sequence[CoverRule] = RULES
) -> Iterator[CoverRule]:
    """The rules that can make a difference in a function, by its instructions in any order."""
    members: dict[str, list[Instruction]] = defaultdict(list)
    for instruction in function.instructions:
        members[group(instruction, sm)].append(instruction)
    for rule in rules:
        earlier, later = members.get(rule.earlier, []), members.get(rule.later, [])
        if earlier and any(_can_use(rule, earlier, instruction) for instruction in later):
            yield rule


def _can_use(rule: CoverRule, earlier: list[Instruction], later: Instruction) -> bool:
    """Whether a rule can be about this later instruction and one of the earlier ones."""
    control = later.control
    if rule.claim is Claim.RESULT:
        return control.write_sb < 6
    if rule.claim is Claim.SOURCES:
        return control.write_sb < 6 or control.read_sb < 6
    written = set(later.defs)
    if rule.claim is Claim.OVERWRITES_RESULT:
        return any(written & set(i.defs) for i in earlier)
    if rule.claim is Claim.OVERWRITES_SOURCES:
        return any(written & set(i.uses) for i in earlier)
    return True


def needed_rules(
    function: Function, sm: int, rules: Sequence[CoverRule] = RULES
) -> tuple[list[str], list[str]]:
    """(usable rules, needed rules) of one function, by name."""
    usable = list(dict.fromkeys(rule.name for rule in usable_rules(function, sm, rules)))
    if not usable:
        return [], []
    accepted = len(HazardValidator(sm).check(function))
    return usable, [
        name
        for name in usable
        if len(HazardValidator(sm, COVER.without(name)).check(function)) > accepted
    ]


def examine(
    path: Path, root: Path, rules: Sequence[CoverRule] = RULES
) -> tuple[Counter[str], list[Need], int]:
    """(uses of each rule, needs, number of functions) of one cubin."""
    uses: Counter[str] = Counter()
    needs: list[Need] = []
    try:
        program = Program.from_cubin(path.read_bytes())
    except BadBinary:
        return uses, needs, 0
    name = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
    small = [f for f in program.functions if len(f.instructions) <= MAX_INSTRUCTIONS]
    for function in small:
        usable, needed = needed_rules(function, program.sm, rules)
        uses.update(usable)
        size = len(function.instructions)
        needs += [(rule, program.sm, name, function.name, size) for rule in needed]
    return uses, needs, len(small)


def rule_record(rule: CoverRule, uses: int, needs: list[Need]) -> dict[str, Any]:
    """The result of one rule as JSON fields."""
    by_size = sorted(needs, key=lambda need: (need[2].startswith("."), need[4], need[2], need[3]))
    return {
        "rule": rule.name,
        "claim": rule.claim.value,
        "functions_that_can_use_it": uses,
        "functions_that_need_it": len(needs),
        "architectures": sorted({need[1] for need in needs}),
        "witnesses": [
            f"{cubin}:{function}" for _, _, cubin, function, _ in by_size[:MAX_WITNESSES]
        ],
    }


def corpus_paths(every: int) -> list[Path]:
    """The committed cubins, and every ``every``-th one of the Triton corpus; none if 0."""
    if every == 0:
        return []
    reordered = sorted((catalogue.ROOT / "tests/corpus/reordered").glob("*.cubin"))
    return [*catalogue.nvcc_corpus(), *reordered, *catalogue.triton_corpus()[::every]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--every", type=int, default=1, help="every N-th Triton cubin; 0: no corpus"
    )
    parser.add_argument("--files", type=Path, nargs="*", default=[], help="further cubins")
    parser.add_argument("--rules", nargs="*", default=[], help="names of the rules to examine")
    parser.add_argument("--jobs", type=int, default=1)


def main(options: argparse.Namespace) -> int:
    """Examine the cubins, print a table, write the file; 1 if a rule has no evidence."""
    began = time.monotonic()
    rules = [rule for rule in RULES if not options.rules or rule.name in options.rules]
    kept = {}
    if options.rules and options.out.exists():
        kept = {record["rule"]: record for record in load(options.out)["rules"]}
    paths = [*corpus_paths(options.every), *options.files]
    uses: Counter[str] = Counter()
    needs: list[Need] = []
    functions = 0
    os.nice(5)
    with ProcessPoolExecutor(options.jobs) as pool:
        work = partial(examine, root=catalogue.ROOT, rules=rules)
        for used, needed, count in pool.map(work, paths, chunksize=4):
            uses.update(used)
            needs += needed
            functions += count
    records = [
        rule_record(rule, uses[rule.name], [need for need in needs if need[0] == rule.name])
        if rule in rules
        else kept[rule.name]
        for rule in reversed({rule.name: rule for rule in reversed(RULES)}.values())
        if rule in rules or rule.name in kept
    ]
    for record in records:
        print(
            f"{record['rule']:55} needed by"
            f" {record['functions_that_need_it']:5} of {record['functions_that_can_use_it']:5}"
            f" on {record['architectures']}"
        )
    save(
        options.out,
        cubins=len(paths),
        functions=functions,
        seconds=round(time.monotonic() - began),
        rules=records,
    )
    return 0 if all(record["functions_that_need_it"] for record in records) else 1
