"""Leaders and groups of block tables against their definition."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.serving.host_tables import groups_of, prefixes_in_pages
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from nostall.serving.batch.ragged import PrefixGroup
from nostall.serving.tables.prefix.leaders import SharedPrefixes
from tests.unit.serving.tables.prefix.page_tables import BY_HAND, PAGE, Pages, draw


def check(pages: Pages) -> SharedPrefixes:
    prefixes = prefixes_in_pages(*pages.arrays, PAGE)
    expected = [pages.leader(sequence) for sequence in range(len(pages.rows))]
    assert list(zip(*map(np.ndarray.tolist, prefixes), strict=True)) == expected
    groups = groups_of(prefixes)
    assert set(groups) == pages.groups()
    again = SharedPrefixes.of(groups, len(pages.rows))
    assert all(map(np.array_equal, prefixes, again))
    return prefixes


@given(st.integers(0, 2**32))
@limits(max_examples=300, deadline=None)
def test_leaders_and_groups_are_those_of_the_definition(seed: int) -> None:
    check(draw(np.random.default_rng(seed)))


@pytest.mark.parametrize("name", BY_HAND)
def test_batches_by_hand(name: str) -> None:
    check(BY_HAND[name])


def test_groups_nest_and_are_in_the_order_of_the_sequences_that_stand_for_them() -> None:
    assert groups_of(check(BY_HAND["two levels"])) == (
        PrefixGroup((0, 1, 2, 3, 4, 5), 32),
        PrefixGroup((0, 2, 4), 64),
        PrefixGroup((1, 3), 64),
        PrefixGroup((1, 3, 5), 48),
    )


def test_a_sequence_that_computes_shared_pages_in_this_step_leaves_the_group() -> None:
    """Sequence 1 has no context yet; the others share all pages that they had before this step."""
    assert groups_of(check(BY_HAND["pages computed in this step"])) == (PrefixGroup((0, 2, 3), 80),)
