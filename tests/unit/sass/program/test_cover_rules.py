"""The in-order rules: which groups prove what about which."""

import pytest

from nostall.sass.program.cover_rules import COVER, RULES, Claim

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


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
    assert not COVER.proofs(load, sm).results
    assert all(load not in COVER.proofs(rule.later, sm).results for rule in RULES)


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_units_prove_nothing_about_the_sources_of_others(sm: int):
    for later in ("functions", "double", "bit-counts", "texture", "tensor-core"):
        assert COVER.proofs(later, sm).sources <= {later}


def test_a_barrier_drains_sources_only_where_compilers_rely_on_it():
    drained = {sm for sm in ARCHITECTURES if COVER.earlier_groups(Claim.DRAINS_SOURCES, "BAR", sm)}
    assert drained == {75, 80, 86, 89}
