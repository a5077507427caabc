"""Each contradiction in a batch is refused, with the sequence and what is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nostall.serving.batch.checks import check_batch
from nostall.serving.batch.examples import make_batch
from nostall.serving.batch.ragged import PrefixGroup, RaggedBatch, Stage, tree_mask
from nostall.serving.errors import BadBatch


def batch() -> RaggedBatch:
    """A decode, a verify, a prefill, an idle sequence, and a speculative chunk over the limit."""
    return make_batch(
        [1, 4, 40, 0, 33], [50, 64, 40, 7, 40], [False, True, False, False, True], page_size=16
    )


def test_stages_follow_from_the_query_lengths() -> None:
    assert batch().stages.tolist()[:3] == [Stage.DECODE, Stage.VERIFY, Stage.PREFILL]
    assert batch().stages[4] == Stage.PREFILL
    assert batch().query_starts.tolist() == [0, 1, 5, 45, 45, 78]


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


CHANGES = {
    "query_lengths is int64": {"query_lengths": np.array([1, 4, 40, 0, 33])},
    r"kv_lengths is int32 \(4,\); allowed is int32 \(5,\)": {"kv_lengths": ints(50, 64, 40, 7)},
    "page size 24; allowed are multiples of 16": {"page_size": 24},
    "page size 0": {"page_size": 0},
    "speculative limit 65; allowed are 1 to 64": {"speculative_limit": 65},
    "sequence 1 .* has a negative query length": {"query_lengths": ints(1, -4, 40, 0, 33)},
    "sequence 2 .* has fewer keys than query tokens": {"kv_lengths": ints(50, 64, 39, 7, 40)},
    "sequence 0 .* needs more pages of 16 keys than the 4": {"kv_lengths": ints(65, 64, 40, 7, 40)},
    "sequence 3 .* has no page for some of its keys": {"kv_lengths": ints(50, 64, 40, 17, 40)},
    "1 tree masks for 5 sequences": {"tree_masks": (None,)},
    "sequence 2 has a tree mask, 40 query tokens and speculative=False": {
        "tree_masks": (None, None, tree_mask([-1] * 40), None, None)
    },
    "sequence 4 has a tree mask, 33 query tokens and speculative=True": {
        "tree_masks": (None, None, None, None, tree_mask([-1] * 33))
    },
    r"sequence 1: the tree mask is bool \(3, 3\); allowed is bool \(4, 4\)": {
        "tree_masks": (None, tree_mask([-1] * 3), None, None, None)
    },
    "prefix group .*: allowed are two or more sequences": {
        "prefix_groups": (PrefixGroup((0,), 16),)
    },
    "prefix group .*: a sequence is in a group once": {"prefix_groups": (PrefixGroup((0, 0), 16),)},
    "shares 24 tokens; allowed are multiples of the page size 16": {
        "prefix_groups": (PrefixGroup((0, 1), 24),)
    },
    "up to the 0 keys before every query": {"prefix_groups": (PrefixGroup((0, 2), 16),)},
    "the pages of its 16 shared tokens differ": {"prefix_groups": (PrefixGroup((0, 1), 16),)},
}
NESTING = "have sequences in common; allowed are groups without common sequences, or one within"


@pytest.mark.parametrize("message", list(CHANGES))
def test_a_contradiction_is_refused(message: str) -> None:
    check_batch(batch())
    with pytest.raises(BadBatch, match=message):
        check_batch(replace(batch(), **CHANGES[message]))


def test_sequences_may_share_the_pages_of_a_prefix() -> None:
    shared = batch()
    table = shared.block_table.copy()
    table[1, :2] = table[0, :2]
    check_batch(replace(shared, block_table=table, prefix_groups=(PrefixGroup((0, 1), 32),)))


def test_of_two_groups_with_a_common_sequence_the_inner_one_shares_more() -> None:
    inner, outer = PrefixGroup((0, 2), 48), PrefixGroup((0, 1, 2), 32)
    nested = make_batch([1] * 4, [80] * 4, prefix_groups=(inner, outer))
    assert (nested.block_table[0, :3] == nested.block_table[2, :3]).all()
    for wrong in ((outer, PrefixGroup((0, 2), 32)), (outer, PrefixGroup((0, 3), 16))):
        with pytest.raises(BadBatch, match=NESTING):
            check_batch(replace(nested, prefix_groups=wrong, block_table=nested.block_table * 0))
