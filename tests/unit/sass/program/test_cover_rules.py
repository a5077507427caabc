"""The in-order rules: which groups prove what about which."""

import pytest

from nostall.sass.program.cover_rules import (
    COVER,
    RULES,
    WITNESSED,
    WITNESSED_GUARDED,
    Claim,
    CoverTable,
    Proofs,
)

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
TRANSCENDENTAL = frozenset(("functions", "double-conversions", "wide-conversions", "bit-counts"))


def proofs(later: str, sm: int) -> Proofs:
    """All that an instruction of a group proves, by pairs with and without witnesses."""
    known, assumed = (COVER.proofs(later, sm, witnessed=w) for w in (True, False))
    return Proofs(*(a | b for a, b in zip(known, assumed, strict=True)))


def test_each_pair_with_witnesses_belongs_to_a_rule():
    assert {rule.pair for rule in RULES} >= WITNESSED


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_a_pair_either_has_witnesses_or_is_assumed(sm: int):
    for later in {rule.later for rule in RULES}:
        for guarded in (False, True):
            known, assumed = (
                COVER.proofs(later, sm, witnessed=w, guarded=guarded) for w in (True, False)
            )
            assert all(not a & b for a, b in zip(known, assumed, strict=True))


def test_a_table_without_witnesses_assumes_everything():
    bare = CoverTable(RULES, frozenset())
    assert not any(bare.proofs("LDS", 90, witnessed=True))
    assert bare.proofs("LDS", 90, witnessed=False) == proofs("LDS", 90)


@pytest.mark.parametrize(
    ("order", "implied"),
    [
        (Claim.RESULT, Claim.OVERWRITES_RESULT),
        (Claim.RESULT, Claim.OVERWRITES_SOURCES),
        (Claim.SOURCES, Claim.OVERWRITES_SOURCES),
    ],
)
def test_an_order_implies_that_a_result_may_overwrite(order: Claim, implied: Claim):
    rules = [r for r in RULES if r.pair.order is order]
    pairs = {(r.name, r.earlier, r.later) for r in rules if r.claim is order}
    assert pairs == {(r.name, r.earlier, r.later) for r in rules if r.claim is implied}


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("load", ["LDG", "LDL", "LD", "LDGSTS"])
def test_loads_from_memory_prove_no_result_and_no_load_proves_theirs(load: str, sm: int):
    assert not proofs(load, sm).results
    assert all(load not in proofs(rule.later, sm).results for rule in RULES)


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_units_prove_nothing_about_the_sources_of_others(sm: int):
    for later in ("double", "texture", "tensor-core", "REDUX"):
        assert proofs(later, sm).sources <= {later}
    for later in TRANSCENDENTAL:
        assert proofs(later, sm).sources == TRANSCENDENTAL


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_opcodes_of_one_unit_prove_each_other_in_compiler_output_only(sm: int):
    for queue in (TRANSCENDENTAL, frozenset(("LDS", "LDSM", "SHFL", "MOVM", "ATOMS"))):
        assert all(proofs(later, sm).results == queue for later in queue)
    for later in TRANSCENDENTAL:
        known = COVER.proofs(later, sm, witnessed=True)
        assert known.results <= {later} and known.sources <= {later}
    assert COVER.proofs("ATOMS", sm, witnessed=True).results == {"ATOMS"}


def test_a_queue_of_results_proves_sources_read_as_well():
    in_order = {(r.earlier, r.later) for r in RULES if r.claim is Claim.RESULT}
    overwrites = {(r.earlier, r.later) for r in RULES if r.claim is Claim.OVERWRITES_SOURCES}
    assert in_order <= overwrites


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_a_guarded_instruction_proves_only_what_compilers_let_it_prove(sm: int):
    for later in {rule.later for rule in RULES}:
        any_guard, guarded = (
            COVER.proofs(later, sm, witnessed=True, guarded=g) for g in (False, True)
        )
        allowed = {p.earlier for p in WITNESSED_GUARDED if p.later == later}
        assert guarded.results | guarded.sources <= allowed
        assert guarded.results <= any_guard.results and guarded.sources <= any_guard.sources
        assert guarded.overwrites_results == any_guard.overwrites_results


def test_a_barrier_drains_sources_only_where_compilers_rely_on_it():
    drained = {sm for sm in ARCHITECTURES if proofs("BAR", sm).drained}
    assert drained == {75, 80, 86, 89}
