"""Cross-entropy of each row of logits, and its gradient, in one kernel.

One block a row: the first loop finds the maximum and the sum of exponentials, the second writes the
gradient.  The loss has label smoothing and a penalty on the logarithm of the sum (z-loss).
"""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def cross_entropy(
    logits_ptr, target_ptr, loss_ptr, grad_ptr, columns, smoothing, z_weight, rows_inverse,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * columns
    grad_ptr += row.to(tl.int64) * columns
    target = tl.load(target_ptr + row)
    high = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    plain_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < columns
        x = tl.load(logits_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
        new_high = tl.maximum(high, x)
        # A lane without a value keeps -inf, whose difference to itself is not a number.
        total = tl.where(mask, total * tl.exp(high - new_high) + tl.exp(x - new_high), total)
        plain_sum += tl.where(mask, x, 0.0)
        high = new_high
    row_high = tl.max(high, 0)
    row_total = tl.sum(total * tl.exp(high - row_high), 0)
    lse = row_high + tl.log(row_total)
    chosen = tl.load(logits_ptr + target).to(tl.float32)
    share = smoothing / columns
    loss = lse - (1.0 - smoothing) * chosen - share * tl.sum(plain_sum, 0) + z_weight * lse * lse
    tl.store(loss_ptr + row, loss * rows_inverse)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < columns
        x = tl.load(logits_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
        grad = tl.exp(x - row_high) / row_total * (1.0 + 2.0 * z_weight * lse) - share
        grad = tl.where(offs == target, grad - (1.0 - smoothing), grad) * rows_inverse
        tl.store(grad_ptr + offs, grad.to(tl.float16), mask=mask)


def launch(rows: int, columns: int, *, tile: tuple[int], warps: int, stages: int = 3) -> LaunchSpec:
    """Launch for (rows, columns) logits; ``tile``: columns of one step."""
    return LaunchSpec(
        grid=(rows, 1, 1),
        args=(
            Buffer(name="logits_ptr", dtype="f16", shape=(rows, columns), low=-4.0, high=4.0),
            Buffer(name="target_ptr", dtype="i32", shape=(rows,), bound=columns),
            Buffer(name="loss_ptr", dtype="f32", shape=(rows,), role="out"),
            Buffer(name="grad_ptr", dtype="f16", shape=(rows, columns), role="out"),
            Scalar(name="columns", dtype="i32", value=columns),
            Scalar(name="smoothing", dtype="f32", value=0.1),
            Scalar(name="z_weight", dtype="f32", value=1e-4),
            Scalar(name="rows_inverse", dtype="f32", value=1 / rows),
            Constant(name="BLOCK", constant=tile[0]),
        ),
        num_warps=warps,
        num_stages=stages,
        flops=12.0 * rows * columns,
    )


def reference(torch, given):  # type: ignore[no-untyped-def]
    """The same in PyTorch, the gradient by autograd."""
    logits = given["logits_ptr"].float().requires_grad_()
    target = given["target_ptr"].long()
    losses = torch.nn.functional.cross_entropy(
        logits, target, label_smoothing=given["smoothing"], reduction="none"
    )
    losses = (losses + given["z_weight"] * logits.logsumexp(1) ** 2) * given["rows_inverse"]
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    return {"loss_ptr": losses.detach(), "grad_ptr": grad}
