"""One unit of attention: a tile of query rows over a range of keys in a paged cache (Triton).

A tile has M rows of one KV head: row = token * GROUP + head of the group. ``attend`` runs the
GEMM-softmax-GEMM pipeline of a unit (arXiv:2412.18106, section 5) with an online softmax in base 2,
independent of the stage that the unit is from.

The page numbers of the next key tile are loaded one iteration ahead. Loads of keys and values then
do not depend on another load of their iteration, so that Triton's pipeliner gives them all stages.
"""
# ruff: noqa: N803, N806 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

MASK_NONE = tl.constexpr(-1)
MASK_ALL = tl.constexpr(0)
"""One loop; every key tile is masked. For memory-bound tiles, where masks cost nothing."""
MASK_BRANCH = tl.constexpr(1)
"""One loop; key tiles on the diagonal or at an end take a branch that masks."""
MASK_TAIL = tl.constexpr(2)
"""A loop without masks, then a loop with masks."""


@triton.jit
def load_pages(pages, first, low, end, PAGE: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr):
    """Pages of the N keys from ``first`` on; entries outside ``low`` to ``end`` are not read.

    ``first`` is a multiple of N. One number if all N keys lie in one page.
    """
    if PAGE % N == 0:
        live = first < end
        if WINDOW:
            live = live & (first + N > low)
        return tl.load(pages + first // PAGE, mask=live, other=0)
    at = first + tl.arange(0, N)
    live = at < end
    if WINDOW:
        live = live & (at >= low)
    if N % PAGE == 0:
        # Counted in pages, which saves a division for each key.
        return tl.load(pages + first // PAGE + tl.arange(0, N) // PAGE, mask=live, other=0)
    return tl.load(pages + at.to(tl.uint32) // PAGE, mask=live, other=0)


@triton.jit
def key_offsets(page, first, stride_block, stride_token, PAGE: tl.constexpr, N: tl.constexpr):
    """Offsets of the N keys from ``first`` on in the cache; ``page`` is from ``load_pages``."""
    step = tl.arange(0, N)
    if PAGE % N == 0:
        start = page.to(tl.int64) * stride_block + (first % PAGE) * stride_token
        return start + step * stride_token
    if N % PAGE == 0:
        return page.to(tl.int64) * stride_block + (step % PAGE) * stride_token
    return page.to(tl.int64) * stride_block + ((first + step).to(tl.uint32) % PAGE) * stride_token


@triton.jit
def load_tile(base, offsets, live, D: tl.constexpr, DIMS: tl.constexpr, FULL: tl.constexpr):
    """Rows of keys or values, shape (N, DIMS); rows that are not ``live`` are 0 and not read."""
    dims = tl.arange(0, DIMS)
    pointers = base + offsets[:, None] + dims[None, :]
    if FULL:
        if D == DIMS:
            return tl.load(pointers)
        return tl.load(pointers, mask=(dims < D)[None, :], other=0.0)
    if D == DIMS:
        return tl.load(pointers, mask=live[:, None], other=0.0)
    return tl.load(pointers, mask=live[:, None] & (dims < D)[None, :], other=0.0)


@triton.jit
def hide_keys(
    scores, first, low, end, length, before, window, tree, context,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Scores with -inf where a row does not see a key.

    The position of row i is ``length[0] - before + i // GROUP``. The length is loaded here, so that
    a branch around this function stays a branch: compilers turn a branch without a load into
    selections that run for every key tile.

    ``tree``: for each row a word whose bit i says whether it sees the query token i, or -1 if the
    row is causal; ``context``: position of query token 0.
    """
    M: tl.constexpr = scores.shape[0]
    N: tl.constexpr = scores.shape[1]
    positions = tl.load(length) - before + tl.arange(0, M) // GROUP
    at = first + tl.arange(0, N)
    seen = (at < end)[None, :] & (at[None, :] <= positions[:, None])
    if WINDOW:
        seen = seen & (at[None, :] > positions[:, None] - window)
    if TREE:
        own = at - context
        shift = tl.minimum(tl.maximum(own, 0), 63).to(tl.int64)
        bits = (tree[:, None] >> shift[None, :]) & 1
        seen = seen & ((own < 0)[None, :] | (bits != 0) | (tree == -1)[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def cap_scores(scores, scale, soft_cap, SOFT_CAP: tl.constexpr):
    """Scores as base-2 exponents with a soft cap, cap * tanh(scale * score / cap), or unchanged."""
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (e^(2x) + 1); 2.885... is 2 / ln 2, 1.442... is 1 / ln 2.
        power = tl.exp2(scores * (scale / soft_cap * 2.8853900817779268))
        scores = soft_cap * 1.4426950408889634 * (1.0 - 2.0 / (power + 1.0))
    return scores


@triton.jit
def softmax_step(scores, largest, total, accumulated, exponent, MASKS: tl.constexpr):
    """One step of the online softmax: the weights of the scores, and the three sums rescaled.

    ``exponent`` times a score is a base-2 exponent; ``largest`` is such an exponent.
    """
    now_largest = tl.maximum(largest, tl.max(scores, 1) * exponent)
    shift = now_largest
    if MASKS != MASK_NONE:
        # A row that has seen no key keeps -inf; 0 replaces it where differences are formed.
        shift = tl.where(now_largest == float("-inf"), 0.0, now_largest)
    weights = tl.exp2(scores * exponent - shift[:, None])
    decay = tl.exp2(largest - shift)
    return weights, now_largest, total * decay + tl.sum(weights, 1), accumulated * decay[:, None]


@triton.jit
def attend_keys(
    query, keys, values, pages, page, begin, end, low, last, length, before, clear_begin,
    clear_end, scale, exponent, soft_cap, window, tree, context, largest, total, accumulated,
    stride_block, stride_token,
    PAGE: tl.constexpr, D: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, MASKS: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    TREE: tl.constexpr,
):  # fmt: skip
    """Add the keys from ``begin`` to ``end`` to the online softmax of the rows ``query``.

    ``page`` holds the pages of the first key tile; the pages of the tile behind ``end`` are
    returned. Keys outside ``low`` to ``last`` are never read.
    """
    DIMS: tl.constexpr = query.shape[1]
    for first in tl.range(begin, end, N, num_stages=STAGES):
        offsets = key_offsets(page, first, stride_block, stride_token, PAGE, N)
        at = first + tl.arange(0, N)
        live = at < last
        if WINDOW:
            live = live & (at >= low)
        page = load_pages(pages, first + N, low, last, PAGE, N, WINDOW)
        key = load_tile(keys, offsets, live, D, DIMS, MASKS == MASK_NONE).to(query.dtype)
        value = load_tile(values, offsets, live, D, DIMS, MASKS == MASK_NONE).to(query.dtype)
        scores = cap_scores(tl.dot(query, tl.trans(key)), scale, soft_cap, SOFT_CAP)
        if MASKS == MASK_BRANCH:
            if (first + N > clear_end) | (first < clear_begin):
                scores = hide_keys(
                    scores, first, low, last, length, before, window, tree, context, GROUP, WINDOW,
                    TREE,
                )  # fmt: skip
        elif MASKS == MASK_ALL:
            scores = hide_keys(
                scores, first, low, last, length, before, window, tree, context, GROUP, WINDOW,
                TREE,
            )  # fmt: skip
        weights, largest, total, accumulated = softmax_step(
            scores, largest, total, accumulated, exponent, MASKS
        )
        accumulated = tl.dot(weights.to(query.dtype), value, accumulated)
    return page, largest, total, accumulated


@triton.jit
def attend(
    query, keys, values, pages, begin, end, low, length, before, clear_begin, clear_end, scale,
    soft_cap, window, tree, context, stride_block, stride_token,
    PAGE: tl.constexpr, D: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, MASKS: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    TREE: tl.constexpr,
):  # fmt: skip
    """Attention of the rows ``query`` (M, DIMS) over the keys ``begin`` to ``end``.

    ``begin`` is a multiple of N and of pages that are smaller than N. The position of row i is
    ``length[0] - before + i // GROUP``; every row sees all keys from ``clear_begin`` to
    ``clear_end``, and no row sees a key before ``low``. ``keys`` and ``values`` point at the KV
    head, ``pages`` at the row of the block table. Returns the result (M, DIMS) in fp32 and the
    base-2 logarithm of the sum of exponents (M); -inf where a row sees no key.
    """
    M: tl.constexpr = query.shape[0]
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    accumulated = tl.zeros([M, query.shape[1]], tl.float32)
    # With a soft cap the scores are base-2 exponents already.
    exponent = 1.0
    if not SOFT_CAP:
        exponent = scale * 1.4426950408889634
    page = load_pages(pages, begin, low, end, PAGE, N, WINDOW)
    middle = begin
    # The first key tiles of a window need masks too.
    if MASKS == MASK_TAIL and not WINDOW:
        middle = begin + tl.maximum(tl.minimum(clear_end, end) - begin, 0) // N * N
        page, largest, total, accumulated = attend_keys(
            query, keys, values, pages, page, begin, middle, low, end, length, before, clear_begin,
            clear_end, scale, exponent, soft_cap, window, tree, context, largest, total,
            accumulated, stride_block, stride_token, PAGE, D, N, STAGES, GROUP, MASK_NONE,
            SOFT_CAP, WINDOW, TREE,
        )  # fmt: skip
    LAST: tl.constexpr = MASKS if MASKS != MASK_TAIL else MASK_BRANCH if WINDOW else MASK_ALL
    page, largest, total, accumulated = attend_keys(
        query, keys, values, pages, page, middle, end, low, end, length, before, clear_begin,
        clear_end, scale, exponent, soft_cap, window, tree, context, largest, total, accumulated,
        stride_block, stride_token, PAGE, D, N, STAGES, GROUP, LAST, SOFT_CAP, WINDOW, TREE,
    )  # fmt: skip
    safe = tl.where(total > 0.0, total, 1.0)
    return accumulated / safe[:, None], largest + tl.log2(total)
