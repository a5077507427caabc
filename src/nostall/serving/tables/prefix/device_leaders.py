"""Triton kernels that find leaders in a block table and arrange the forest, a program a sequence.

The integers are those of :mod:`nostall.serving.tables.prefix.leaders` and
:mod:`nostall.serving.tables.prefix.forest`. Both launches read what the GPU holds already, and the
host waits for nothing.
"""
# ruff: noqa: N803 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nostall.serving.tables.prefix.device_forest import key_cost


@triton.jit
def context_pages(query_starts, kv_lengths, columns, sequence, mask, PAGE: tl.constexpr):
    """Whole pages of the context of sequences; 0 for one without query tokens."""
    start = tl.load(query_starts + sequence, mask, 0)
    length = tl.load(query_starts + sequence + 1, mask, 0) - start
    keys = tl.maximum(tl.load(kv_lengths + sequence, mask, 0) - length, 0)
    return tl.where(length > 0, tl.minimum(keys // PAGE, columns), 0)


@triton.jit
def common_pages(left, right, most, BLOCK: tl.constexpr):
    """Leading pages, at most ``most``, that two rows of the block table have in common."""
    common = most * 0
    is_same = most > 0
    while is_same:
        at = common + tl.arange(0, BLOCK)
        mine = tl.load(left + at, at < most, 0)
        other = tl.load(right + at, at < most, 0)
        # Pages behind the last are 0, as vLLM's null block.
        end = tl.min(tl.where((mine != other) | (mine == 0), at, common + BLOCK))
        is_same = end == common + BLOCK
        common = end
    return common


@triton.jit(do_not_specialize=["sequences", "columns", "stride"])
def find_leaders(
    block_table, query_starts, kv_lengths, sequences, columns, stride, leaders, shared,
    branch_costs, branch_tokens,
    PAGE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write the leader and shared tokens of this program's sequence, and clear its sums.

    The candidates are the earlier sequences that have the next page in common with it, in order.
    Where equal pages have equal pages before them, as vLLM's prefix cache gives them, each
    candidate shares more than the last one did.
    """
    sequence = tl.program_id(0)
    tl.store(branch_costs + sequence, tl.full([], 0, tl.int64))
    tl.store(branch_tokens + sequence, 0)
    lane = tl.arange(0, BLOCK_S)
    is_earlier = lane < sequence
    pages = context_pages(query_starts, kv_lengths, columns, lane, is_earlier, PAGE)
    always = sequence >= 0
    mine = context_pages(query_starts, kv_lengths, columns, sequence, always, PAGE)
    rows = block_table + lane.to(tl.int64) * stride
    row = block_table + sequence.to(tl.int64) * stride
    deepest = sequence * 0
    leader = deepest - 1
    last = leader
    is_searching = mine > 0
    while is_searching:
        page = tl.load(row + deepest)
        may_share = (lane > last) & (pages > deepest)
        others = tl.load(rows + deepest, may_share, 0)
        is_candidate = may_share & (others == page) & (others != 0)
        last = tl.min(tl.where(is_candidate, lane, BLOCK_S))
        is_searching = last < BLOCK_S
        if is_searching:
            its = context_pages(query_starts, kv_lengths, columns, last, always, PAGE)
            its_row = block_table + last.to(tl.int64) * stride
            common = common_pages(row, its_row, tl.minimum(mine, its), BLOCK_P)
            leader = tl.where(common > deepest, last, leader)
            deepest = tl.maximum(deepest, common)
            is_searching = deepest < mine
    tl.store(leaders + sequence, leader)
    tl.store(shared + sequence, deepest * PAGE)


@triton.jit
def meet(sequence, leaders, shared, lane):
    """Where the paths of this sequence and of each other one part.

    Returns the tokens that they share, and the child below their common ancestor on the path of the
    other and of this one; -1 where the ancestor is that sequence itself.
    """
    x = lane
    y = lane * 0 + sequence
    child_x = lane * 0 - 1
    child_y = child_x
    common = lane * 0 + 2147483647
    while tl.max((x != y).to(tl.int32)) > 0:
        # A leader is before its members, so the later of two different sequences moves up.
        moves = x != y
        later = tl.maximum(tl.maximum(x, y), 0)
        up = tl.gather(leaders, later, 0)
        common = tl.where(moves, tl.minimum(common, tl.gather(shared, later, 0)), common)
        moves_x = moves & (x > y)
        moves_y = moves & (y > x)
        child_x = tl.where(moves_x, x, child_x)
        child_y = tl.where(moves_y, y, child_y)
        x = tl.where(moves_x, up, x)
        y = tl.where(moves_y, up, y)
    return common, child_x, child_y


@triton.jit
def deepest_of(is_choice, shared, lane, BLOCK_S: tl.constexpr):
    """The first sequence of those with the most shared tokens; -1 if there is none."""
    most = tl.max(tl.where(is_choice, shared, -1))
    first = tl.min(tl.where(is_choice & (shared == most), lane, BLOCK_S))
    return tl.where(first < BLOCK_S, first, -1)


@triton.jit(do_not_specialize=["sequences"])
def arrange_forest(
    query_starts, sequences, leaders, shared, first_rows, deepest, node_tokens, parents,
    branch_costs, branch_tokens,
    TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr, KEY_COSTS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write the place of this program's sequence in the forest, and add it to its node's branches.

    ``branch_costs`` and ``branch_tokens`` must be 0 before the launch: sums over the branches of a
    node except its leader's, of the cost of a key and of query tokens.
    """
    sequence = tl.program_id(0)
    lane = tl.arange(0, BLOCK_S)
    is_given = lane < sequences
    lead = tl.load(leaders + lane, is_given, -1)
    have = tl.load(shared + lane, is_given, 0)
    start = tl.load(query_starts + lane, is_given, 0)
    length = tl.load(query_starts + lane + 1, is_given, 0) - start
    my_lead = tl.load(leaders + sequence)
    mine = tl.load(shared + sequence)
    common, child, my_child = meet(sequence, lead, have, lane)

    is_below = my_child < 0
    subtree = tl.sum(tl.where(is_below, length, 0))
    # Of two children of one ancestor the deeper one is first, then the earlier one.
    depth = tl.gather(have, tl.maximum(child, 0), 0)
    my_depth = tl.gather(have, tl.maximum(my_child, 0), 0)
    is_first = (depth > my_depth) | ((depth == my_depth) & (child < my_child))
    is_before = (my_child >= 0) & ((child < 0) | is_first)
    tl.store(first_rows + sequence, tl.sum(tl.where(is_before, length, 0)))

    has_node = my_lead >= 0
    is_member = has_node & (common >= mine)
    is_same = has_node & (lead == my_lead) & (have == mine)
    node = tl.min(tl.where(is_same, lane, BLOCK_S))
    total = tl.sum(tl.where(is_member, length, 0))
    tl.store(node_tokens + sequence, tl.where(node == sequence, total, 0))
    own = tl.where(has_node, node, -1)
    inner = deepest_of(is_given & (lead == sequence), have, lane, BLOCK_S)
    tl.store(deepest + sequence, tl.where(inner >= 0, inner, own))
    above = deepest_of(has_node & (lead == my_lead) & (have < mine), have, lane, BLOCK_S)
    is_leader = has_node & (lane == my_lead)
    its_lead = tl.max(tl.where(is_leader, lead, -1))
    its_tokens = tl.max(tl.where(is_leader, have, 0))
    outer = is_given & (its_lead >= 0) & (lead == its_lead) & (have == its_tokens)
    outer_node = tl.min(tl.where(outer, lane, BLOCK_S))
    outer_node = tl.where(outer_node < BLOCK_S, outer_node, -1)
    tl.store(parents + sequence, tl.where(above >= 0, above, outer_node))
    if has_node:
        cost = key_cost(subtree, TILE_TOKENS, LIMITS, KEY_COSTS, GROUP)
        tl.atomic_add(branch_costs + node, cost)
        tl.atomic_add(branch_tokens + node, subtree)
