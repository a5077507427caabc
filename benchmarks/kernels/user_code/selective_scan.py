"""Selective scan of a state-space model (Mamba), fp32: one block a channel of a sequence.

``h[t] = exp(delta[t] * A) * h[t - 1] + delta[t] * B[t] * x[t]`` and ``y[t] = C[t] . h[t] + D x[t]``
with STATES states, as associative scans over chunks of BLOCK_T steps.  ``x``, ``delta`` and ``y``
are (sequences, channels, L); ``B`` and ``C`` are (sequences, STATES, L).
"""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def _combine(a_left, b_left, a_right, b_right):
    return a_left * a_right, b_left * a_right + b_right


@triton.jit
def selective_scan(
    x_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, d_ptr, y_ptr, L,
    STATES: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    channel, sequence = tl.program_id(0), tl.program_id(1)
    row = (sequence * tl.num_programs(0) + channel) * L
    states = tl.arange(0, STATES)
    offs_t = tl.arange(0, BLOCK_T)
    a = tl.load(a_ptr + channel * STATES + states)
    skip = tl.load(d_ptr + channel)
    h = tl.zeros((STATES,), tl.float32)
    last = offs_t[None, :] == BLOCK_T - 1
    for start in range(0, L, BLOCK_T):
        t = start + offs_t
        x = tl.load(x_ptr + row + t)
        raw = tl.load(delta_ptr + row + t)
        delta = tl.where(raw > 15.0, raw, tl.log(1.0 + tl.exp(raw)))
        place = (sequence * STATES + states)[:, None] * L + t[None, :]
        decay = tl.exp(delta[None, :] * a[:, None])
        inflow = (delta * x)[None, :] * tl.load(b_ptr + place)
        through, gained = tl.associative_scan((decay, inflow), 1, _combine)
        state = through * h[:, None] + gained
        y = tl.sum(state * tl.load(c_ptr + place), 0) + skip * x
        tl.store(y_ptr + row + t, y)
        h = tl.sum(tl.where(last, state, 0.0), 1)


def launch(
    sequences: int, channels: int, length: int, states: int,
    *, tile: tuple[int], warps: int, stages: int = 3,
) -> LaunchSpec:  # fmt: skip
    """Launch for ``sequences`` sequences of ``length`` steps; ``tile``: steps of a chunk."""
    if length % tile[0]:
        raise ValueError(f"L={length} is not a multiple of the chunk {tile[0]}")
    shape, projected = (sequences, channels, length), (sequences, states, length)
    return LaunchSpec(
        grid=(channels, sequences, 1),
        args=(
            Buffer(name="x_ptr", dtype="f32", shape=shape),
            Buffer(name="delta_ptr", dtype="f32", shape=shape),
            Buffer(name="a_ptr", dtype="f32", shape=(channels, states), low=-2.0, high=-0.1),
            Buffer(name="b_ptr", dtype="f32", shape=projected),
            Buffer(name="c_ptr", dtype="f32", shape=projected),
            Buffer(name="d_ptr", dtype="f32", shape=(channels,)),
            Buffer(name="y_ptr", dtype="f32", shape=shape, role="out"),
            Scalar(name="L", dtype="i32", value=length),
            Constant(name="STATES", constant=states),
            Constant(name="BLOCK_T", constant=tile[0]),
        ),
        num_warps=warps,
        num_stages=stages,
        flops=9.0 * sequences * channels * length * states,
    )


def reference(torch, given):  # type: ignore[no-untyped-def]
    """The same in PyTorch, step by step."""
    x, delta = given["x_ptr"], torch.nn.functional.softplus(given["delta_ptr"])
    h = torch.zeros(*x.shape[:2], given["STATES"])
    outputs = []
    for t in range(x.shape[2]):
        step = delta[:, :, t, None]
        inflow = step * x[:, :, t, None] * given["b_ptr"][:, None, :, t]
        h = torch.exp(step * given["a_ptr"]) * h + inflow
        outputs.append((h * given["c_ptr"][:, None, :, t]).sum(-1))
    return {"y_ptr": torch.stack(outputs, -1) + given["d_ptr"][:, None] * x}
