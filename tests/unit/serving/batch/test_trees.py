"""Tree masks: which are trees, and their words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.serving.batch.examples import make_batch
from nostall.serving.batch.ragged import check_tree, pack_trees, tree_mask
from nostall.serving.errors import BadBatch

parents = st.integers(0, 64).flatmap(
    lambda tokens: st.tuples(*(st.integers(-1, token - 1) for token in range(tokens))).map(list)
)


def ancestors(token: int, parent_of: list[int]) -> set[int]:
    return {token} | (ancestors(parent_of[token], parent_of) if parent_of[token] >= 0 else set())


@given(parents)
def test_a_token_sees_itself_and_its_ancestors(parent_of: list[int]) -> None:
    mask = tree_mask(parent_of)
    check_tree(mask, len(parent_of), "tree")
    for token, row in enumerate(mask):
        assert set(np.flatnonzero(row).tolist()) == ancestors(token, parent_of)


@given(st.integers(0, 6).flatmap(lambda n: st.lists(st.booleans(), min_size=n * n, max_size=n * n)))
def test_the_check_accepts_exactly_the_masks_of_trees(bits: list[bool]) -> None:
    size = round(len(bits) ** 0.5)
    mask = np.array(bits, np.bool_).reshape(size, size)
    last = [max(np.flatnonzero(row[:token]), default=-1) for token, row in enumerate(mask)]
    is_tree = np.array_equal(mask, tree_mask([int(parent) for parent in last]))
    if is_tree:
        check_tree(mask, size, "tree")
    else:
        with pytest.raises(BadBatch):
            check_tree(mask, size, "tree")


def test_errors_name_the_token() -> None:
    later, blind, foreign = tree_mask([-1, 0, 1]), tree_mask([-1, 0, 1]), tree_mask([-1, 0, 0])
    later[0, 2] = True
    blind[1, 1] = False
    foreign[2, 1] = True
    foreign[1, 0] = False
    for mask, message in (
        (later, "token 0 of the tree mask sees the later token 2"),
        (blind, "token 1 of the tree mask does not see itself"),
        (foreign, "no tree: token 2 and its last ancestor 1 see different tokens"),
    ):
        with pytest.raises(BadBatch, match=message):
            check_tree(mask, 3, "tree")
    with pytest.raises(BadBatch, match="token 1 of a tree has the parent 1"):
        tree_mask([-1, 1])


def test_words_hold_one_bit_for_each_seen_token() -> None:
    deep = tree_mask(list(range(-1, 63)))
    masks = (None, tree_mask([-1, 0, 0]), None, deep)
    batch = make_batch([1, 3, 0, 64], [9, 9, 0, 99], [False, True, False, True])
    packed = pack_trees(
        type(batch)(**{**vars(batch), "tree_masks": masks, "speculative_limit": 64})
    )
    assert packed.offsets.tolist() == [-1, 0, -1, 3]
    assert packed.words[:3].tolist() == [0b1, 0b11, 0b101]
    assert packed.words[3:].view(np.uint64).tolist() == [2 ** (i + 1) - 1 for i in range(64)]
    assert pack_trees(batch).words.tolist() == [0]
