"""The PTX validator refuses every seeded violation, and there are enough of each kind."""

from __future__ import annotations

import os
from itertools import islice

import pytest

from tests.mutations.ptx.content_violations import CONTENTS
from tests.mutations.ptx.mutants import VIOLATIONS, mutants, validator
from tests.mutations.ptx.order_violations import ORDERS

COUNT = int(os.environ.get("NOSTALL_MUTANTS", "5"))
"""Number of mutants of each kind that are checked."""

RARE = {
    "accumulator above its wait": 3,
    "tensor memory result above its wait": 1,
    "fragment written below its fence": 1,
    "carry chain crossed": 1,
    "stack pointer used above its definition": 3,
    "store above a load": 4,
    "volatile accesses exchanged": 1,
    "atomics exchanged": 2,
    "mbarrier operations exchanged": 2,
    "bulk copy across an mbarrier operation": 2,
    "shuffles exchanged": 2,
    "access across an atomic": 3,
    "clock reads exchanged": 1,
    "call parameter stored after the call": 4,
    "load moved away from its pragma": 1,
    "volatile lost": 2,
    "hint on an access of any space": 3,
    "scope of an atomic changed": 6,
    "atomic operation changed": 5,
    "matrix shape changed": 4,
    "local variable lost": 5,
    "call arguments exchanged": 2,
    "stored call parameters exchanged": 1,
    "module variables exchanged": 3,
    "register budget beside setmaxnreg": 1,
}
"""Kinds that few texts have a place for -> number of texts, at least."""


@pytest.mark.parametrize("kind", VIOLATIONS)
def test_every_seeded_violation_is_refused(kind: str) -> None:
    made = list(islice(mutants(kind, per_text=1), COUNT))
    verdicts = [(mutant, validator(mutant.original).check(mutant.candidate)) for mutant in made]
    assert not [str(mutant) for mutant, verdict in verdicts if verdict.accepted]
    assert all(finding.line > 0 for _, verdict in verdicts for finding in verdict.findings)
    assert len(made) >= min(COUNT, RARE.get(kind, COUNT)), f"{kind}: {len(made)} mutants"


@pytest.mark.parametrize(
    ("kind", "finding"),
    [
        ("accumulator above its wait", "asynchronous-operand"),
        ("tensor memory result above its wait", "asynchronous-operand"),
        ("fragment written below its fence", "asynchronous-operand"),
        ("carry chain crossed", "carry-order"),
        ("atomics exchanged", "effect-order"),
        ("load above a store", "memory-order"),
        ("matrix product across a warp barrier", "convergence"),
        ("guard above its definition", "operand-value"),
        ("constant changed", "foreign-instruction"),
        ("instruction lost", "lost-instruction"),
        ("kernel named as something else", "renaming"),
        ("register budget beside setmaxnreg", "register-budget"),
        ("damaged text", "unreadable"),
    ],
)
def test_a_finding_names_the_broken_rule(kind: str, finding: str) -> None:
    mutant = next(mutants(kind, per_text=1))
    verdict = validator(mutant.original).check(mutant.candidate)
    assert finding in {found.kind for found in verdict.findings}


def test_there_are_many_kinds_and_no_two_have_one_name() -> None:
    assert len(VIOLATIONS) == len(ORDERS) + len(CONTENTS) >= 70
    assert set(RARE) <= set(VIOLATIONS)
