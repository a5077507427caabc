"""The Triton kernel of a loss: statistics of rows of logits, and their gradients in place.

A program takes one row. It reads the row once for the maximum, the sum of exponentials and what a
smoothed loss needs; it reads it again, from the L2 cache where the rows in flight fit, and writes
the gradient over the logits. An entropy is a pass between both.
"""
# ruff: noqa: N803 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

MAX_BLOCK = 8192
"""Classes that a program loads at once."""
ELEMENTS_PER_THREAD = 16
WARP = 32


@triton.jit
def _activated(raw, inner, cap, CAP: tl.constexpr):
    """``inner * raw``, or with a soft cap ``cap * tanh(inner * raw)``."""
    x = raw.to(tl.float32) * inner
    if CAP:
        x = cap - 2.0 * cap / (tl.exp(2.0 * x) + 1.0)
    return x


@triton.jit
def _row_statistics(
    base, inner, cap, class_weight,
    CLASSES: tl.constexpr, CAP: tl.constexpr, SUM: tl.constexpr, WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Logarithm of the sum of exponentials of a row, and the sum of its logits by their weights."""
    top = float("-inf")
    total = 0.0
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CLASSES, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < CLASSES
        raw = tl.load(base + at, mask=inside, other=0.0, eviction_policy="evict_last")
        x = _activated(raw, inner, cap, CAP)
        if SUM:
            weight = 1.0
            if WEIGHTS:
                weight = tl.load(class_weight + at, mask=inside, other=0.0).to(tl.float32)
            weighted += tl.where(inside, x * weight, 0.0)
        x = tl.where(inside, x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe), 0)
        top = higher
    return top + tl.log(total), tl.sum(weighted, 0)


@triton.jit
def _row_entropy(
    base, inner, cap, lse, CLASSES: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr
):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CLASSES, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < CLASSES
        raw = tl.load(base + at, mask=inside, other=0.0)
        log_p = _activated(raw, inner, cap, CAP) - lse
        total -= tl.where(inside, tl.exp(log_p) * log_p, 0.0)
    return tl.sum(total, 0)


@triton.jit
def loss_rows(
    logits, row_stride, labels, inner, cap, lse_out, picked_out, sum_out,
    share, label_share, constant, class_weight, entropy_out, entropy_grad,
    CLASSES: tl.constexpr, CAP: tl.constexpr, STATISTICS: tl.constexpr, SUM: tl.constexpr,
    GRADIENT: tl.constexpr, WEIGHTS: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics of one row of logits, and the gradient in its place.

    ``lse_out``: logarithm of the sum of exponentials (read if it is not computed).  ``picked_out``:
    the logit of the label.  ``sum_out``: the sum of all logits, by ``class_weight``.  The gradient
    is ``share * softmax + constant * class_weight``, less ``label_share`` at the label.  With
    ``ENTROPY``, ``entropy_out`` is the entropy (read if it is not computed); its gradient is added.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    label = tl.load(labels + row)
    if STATISTICS:
        # Before the gradient is written over the logit.
        tl.store(picked_out + row, _activated(tl.load(base + label), inner, cap, CAP))
        lse, weighted = _row_statistics(
            base, inner, cap, class_weight, CLASSES, CAP, SUM, WEIGHTS, BLOCK
        )
        tl.store(lse_out + row, lse)
        if SUM:
            tl.store(sum_out + row, weighted)
        if ENTROPY:
            entropy = _row_entropy(base, inner, cap, lse, CLASSES, CAP, BLOCK)
            tl.store(entropy_out + row, entropy)
    else:
        lse = tl.load(lse_out + row)
        if ENTROPY:
            entropy = tl.load(entropy_out + row)
    if GRADIENT:
        row_share = tl.load(share + row)
        row_label = tl.load(label_share + row)
        row_constant = tl.load(constant + row)
        if ENTROPY:
            row_entropy = tl.load(entropy_grad + row)
        for start in range(0, CLASSES, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < CLASSES
            raw = tl.load(base + at, mask=inside, other=0.0, eviction_policy="evict_first")
            x = _activated(raw, inner, cap, CAP)
            gradient = row_share * tl.exp(x - lse)
            if WEIGHTS:
                weight = tl.load(class_weight + at, mask=inside, other=0.0).to(tl.float32)
                gradient += row_constant * weight
            else:
                gradient += row_constant
            gradient -= tl.where(at == label, row_label, 0.0)
            if ENTROPY:
                spread = row_entropy * tl.exp(x - lse) * (x - lse + entropy)
                # One that nothing reads may be no number.
                gradient -= tl.where(row_entropy != 0.0, spread, 0.0)
            if CAP:
                gradient *= cap * (1.0 - (x / cap) * (x / cap))
            gradient *= inner
            tl.store(base + at, gradient.to(logits.dtype.element_ty), mask=inside)


def launch_shape(classes: int) -> tuple[int, int]:
    """Classes that a program loads at once, and its warps."""
    block = min(MAX_BLOCK, triton.next_power_of_2(max(classes, 16)))
    return block, max(1, min(16, block // (ELEMENTS_PER_THREAD * WARP)))
