"""The in-order rules: which groups prove what about which."""

import pytest

from nostall.sass.program.cover_rules import COVER, RULES, WITNESSED, Claim, CoverTable, Proofs

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


def proofs(later: str, sm: int) -> Proofs:
    """All that an instruction of a group proves, by pairs with and without witnesses."""
    known, assumed = (COVER.proofs(later, sm, witnessed=w) for w in (True, False))
    return Proofs(*(a | b for a, b in zip(known, assumed, strict=True)))


def test_each_pair_with_witnesses_belongs_to_a_rule():
    assert {rule.pair for rule in RULES} >= WITNESSED


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_a_pair_either_has_witnesses_or_is_assumed(sm: int):
    for later in {rule.later for rule in RULES}:
        known, assumed = (COVER.proofs(later, sm, witnessed=w) for w in (True, False))
        assert all(not a & b for a, b in zip(known, assumed, strict=True))


def test_a_table_without_witnesses_assumes_everything():
    bare = CoverTable(RULES, frozenset())
    assert not any(bare.proofs("LDS", 90, witnessed=True))
    assert bare.proofs("LDS", 90, witnessed=False) == proofs("LDS", 90)


@pytest.mark.parametrize(
    ("order", "implied"),
    [
        (Claim.RESULT, Claim.OVERWRITES_RESULT),
        (Claim.SOURCES, Claim.OVERWRITES_SOURCES),
    ],
)
def test_an_order_implies_that_a_result_may_overwrite(order: Claim, implied: Claim):
    pairs = {(r.name, r.earlier, r.later) for r in RULES if r.claim is order}
    assert pairs == {(r.name, r.earlier, r.later) for r in RULES if r.claim is implied}


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("load", ["LDG", "LDL", "LD", "LDGSTS"])
def test_loads_from_memory_prove_no_result_and_no_load_proves_theirs(load: str, sm: int):
    assert not proofs(load, sm).results
    assert all(load not in proofs(rule.later, sm).results for rule in RULES)


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_units_prove_nothing_about_the_sources_of_others(sm: int):
    for later in ("functions", "double", "bit-counts", "texture", "tensor-core"):
        assert proofs(later, sm).sources <= {later}


def test_a_barrier_drains_sources_only_where_compilers_rely_on_it():
    drained = {sm for sm in ARCHITECTURES if proofs("BAR", sm).drained}
    assert drained == {75, 80, 86, 89}
