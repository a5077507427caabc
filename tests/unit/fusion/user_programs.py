"""Programs of users, compiled in Triton's interpreter and compared with eager PyTorch.

``python -m tests.unit.fusion.user_programs FOLDER`` prints the wrong results of each program as
JSON. Each program stands for a kind of fault; a program without wrong results has an empty list.
"""

from __future__ import annotations

import json
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import nostall
from nostall.fusion.fuse import StitchedFunction, stitch_function
from nostall.fusion.testing.triton_interpreter import prepare

Function = Callable[..., Any]
Program = Callable[[Path], Iterator[str]]
ALWAYS_STITCHED = {
    "nostall.choose": "stitched",
    "nostall.fuse": "all",
    "nostall.fallback": "eager",
}


def stitch(function: Function, folder: Path) -> StitchedFunction:
    torch._dynamo.reset()
    return stitch_function(function, folder=folder)


def by_backend(function: Function) -> Any:
    """The function by the ``torch.compile`` backend, with all kernels that it can have."""
    torch._dynamo.reset()
    return nostall.fuse(function, options=ALWAYS_STITCHED)


def differences(
    name: str, results: Any, expected: Any, rtol: float = 1e-5, signs: bool = True
) -> Iterator[str]:
    """Descriptions of results that are not those of eager PyTorch; ``signs``: those of 0 count."""
    pairs = zip(tree_leaves(results), tree_leaves(expected), strict=True)
    for at, (result, wanted) in enumerate(pairs):
        if (result.dtype, result.shape) != (wanted.dtype, wanted.shape):
            yield f"{name} {at}: {result.dtype} {result.shape}, not {wanted.dtype} {wanted.shape}"
            continue
        a, b = result.detach().double(), wanted.detach().double()
        is_equal = torch.allclose(a, b, rtol=rtol, atol=1e-6, equal_nan=True)
        zeros = (b == 0) & (a == 0) & signs
        if not is_equal or not torch.equal(a.signbit() & zeros, b.signbit() & zeros):
            wrong = (~torch.isclose(a, b, rtol, 1e-6, True)).flatten()
            pairs_of_values = zip(
                a.flatten()[wrong].tolist(), b.flatten()[wrong].tolist(), strict=True
            )
            yield f"{name} {at}: (result, expected) {list(pairs_of_values)[:4]}"


def gradients(function: Function, *inputs: Tensor) -> list[Tensor]:
    """The gradients of the sum of a function's result."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(function(*leaves).sum(), leaves))


def weights_beside_a_dynamic_batch(folder: Path) -> Iterator[str]:
    """Kernels without a tensor of the dynamic size, in a graph that has one."""

    def scaled_weights(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return x @ (w.float() * s).softmax(-1)

    def repeated_rows(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), s.expand(x.shape[0], -1).sum(0)

    w, s = torch.arange(-40, 40, dtype=torch.int8).view(8, 10), torch.linspace(0.1, 1, 10)
    for function in (scaled_weights, repeated_rows):
        compiled = by_backend(function)
        for rows in (5, 7, 12):
            x = torch.randn(rows, 8)
            yield from differences(
                f"{function.__name__} of {rows} rows", compiled(x, w, s), function(x, w, s)
            )


def attention(folder: Path) -> Iterator[str]:
    """Operators that PyTorch decomposes for inference only, with their gradients."""
    x = torch.randn(1, 2, 5, 4)
    for is_causal in (False, True):

        def attend(q: Tensor, is_causal: bool = is_causal) -> Tensor:
            y = F.scaled_dot_product_attention(q, q.exp(), q * 2, is_causal=is_causal)
            return y.square()

        yield from differences("value", stitch(attend, folder)(x), attend(x))
        result, expected = (gradients(f, x) for f in (stitch(attend, folder), attend))
        yield from differences("gradient", result, expected, 1e-4)


def operators_that_inductor_computes(folder: Path) -> Iterator[str]:
    """Operators without a decomposition in Inductor's graphs."""

    def function(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        changed = torch.select_scatter(x, z[1], 0, -1)
        return x.addcmul(y, z, value=3), x.addcdiv(y, z.exp(), value=-0.5), changed.exp()

    x, y, z = torch.randn(3, 4, 5)
    compiled = stitch(function, folder)
    yield from differences("result", compiled(x, y, z), function(x, y, z))
    yield from map(str, compiled.unfused)


def narrow_floats_that_are_compared(folder: Path) -> Iterator[str]:
    """Comparisons of values that a kernel computes with more bits than memory holds."""
    x, w = torch.randn(3, 40), torch.randn(40)

    def extreme(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).amax(-1) - (x * w).amin(-1)

    def jumps(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        tiny, large = x * w * 3e-8, x * w.abs() * 1e5
        signs = tiny > 0, tiny.bool(), tiny.any(-1), torch.logical_or(tiny, tiny), tiny.abs() == 0
        nothing_infinite = torch.nan_to_num(large).isfinite()
        return *signs, large.isinf(), nothing_infinite, large.isfinite()

    for dtype in (torch.float16, torch.bfloat16):
        inputs = x.to(dtype), w.to(dtype)
        for compiled in (by_backend(extreme), stitch(extreme, folder)):
            result, expected = gradients(compiled, *inputs), gradients(extreme, *inputs)
            yield from differences(f"gradient in {dtype}", result, expected, 0.02)
        yield from differences(f"jump in {dtype}", stitch(jumps, folder)(*inputs), jumps(*inputs))


def python_numbers(folder: Path) -> Iterator[str]:
    """Binary operators of a tensor and a Python number, for each dtype."""
    values = torch.tensor([0.1, 0.3, 0.9, 2.7, -0.7, -3.0, 100.0, 0.0])
    operators: tuple[Function, ...] = (
        *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
        *(torch.add, torch.sub, operator.mul, operator.mod, torch.fmod, torch.where),
    )
    dtypes = "float32 float16 bfloat16 int64 uint8 bool"
    for dtype in (getattr(torch, name) for name in dtypes.split()):
        x = values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)

        not_of_bools = (torch.sub, operator.mod, torch.fmod)
        functions = [f for f in operators if dtype != torch.bool or f not in not_of_bools]

        def apply(x: Tensor, functions: list[Function] = functions) -> list[Tensor]:
            results = []
            for function in functions:
                for number in (0.1, 3):
                    is_where = function is torch.where
                    results.append(function(x != 0, x, number) if is_where else function(x, number))
            return results

        compiled = stitch(apply, folder)
        yield from differences(f"{dtype}", compiled(x), apply(x))
        yield from map(str, compiled.unfused)


def several_dtypes(folder: Path) -> Iterator[str]:
    """Comparisons of tensors of different dtypes, which have a common one."""
    numbers = [0, 1, 3, 127, -128, -56, 200, 255, 2049, 70000]
    dtypes = "uint8 int8 int64 float16 bfloat16"
    every = [torch.tensor(numbers).to(getattr(torch, name)) for name in dtypes.split()]

    def compare(*tensors: Tensor) -> list[Tensor]:
        first, *others = tensors
        results = [f(first, x) for x in others for f in (torch.eq, torch.gt)]
        return [*results, *(torch.where(first > x, first, x) for x in others)]

    for at, first in enumerate(every):
        others = [x.roll(shift) for x in every[at + 1 :] for shift in (0, 3)]
        if others:
            compiled = stitch(compare, folder)
            result, expected = compiled(first, *others), compare(first, *others)
            yield from differences(f"{first.dtype} and others", result, expected)
            yield from map(str, compiled.unfused)


def results_in_shared_memory(folder: Path) -> Iterator[str]:
    """Results of which PyTorch gives each its own memory, changed in place after the call."""
    half = torch.tensor([0.5, 0.5])

    def function(x: Tensor) -> tuple[Tensor, ...]:
        constants = torch.tensor([0.5, 0.5]), torch.tensor(2.0)
        same = x**1, x.clone(), x.to(x.dtype, copy=True), x.sum(()), x + 0, half.clone()
        return x + 1, x + 1, *constants, *same, (x + 1).view(2, 1), x.mul(1.0)

    def view_and_value(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y, y.view(2, 1)

    def changed_constant(x: Tensor) -> Tensor:
        y = torch.tensor([1.0, 2.0])
        y.add_(x)
        return y.exp()

    for compiled in (stitch(function, folder), by_backend(function)):
        for place in range(len(function(torch.zeros(2)))):
            x = torch.zeros(2)
            results = compiled(x)
            results[place].add_(100)
            others = [y for at, y in enumerate(results) if at != place]
            expected = [y for at, y in enumerate(function(torch.zeros(2))) if at != place]
            yield from differences(f"result {place} changed, other", others, expected)
            yield from differences("input", x, torch.zeros(2))
            yield from differences("next call", compiled(x), function(x))
    y, view = stitch(view_and_value, folder)(torch.zeros(2))
    y.zero_()
    yield from differences("view", view, torch.zeros(2, 1))
    compiled = stitch(changed_constant, folder)
    for _ in range(2):
        x = torch.zeros(2)
        yield from differences("constant changed by the function", compiled(x), changed_constant(x))


def scalars(folder: Path) -> Iterator[str]:
    """Calls that name an axis of a tensor that has none."""

    def reductions(s: Tensor) -> list[Tensor]:
        named = s.sum(0), s.mean(-1), s.amax(0), s.amin(0), s.prod(0), s.any(0), s.all(-1)
        spread = s.var(0, correction=0), s.std(0, correction=0), *torch.var_mean(s, 0, correction=0)
        normalised = s.softmax(0), s.log_softmax(-1), s.logsumexp(0), s.cumsum(0), s.norm(dim=0)
        views = s.transpose(0, 0), s.squeeze(0), s.unsqueeze(0), s.flatten(), s.expand(2, 3)
        picked = s.gather(0, torch.tensor(0)), s.sort(0).values, s.flip(0), s.argmax(0)
        return [(x * 1).clone() for x in (*named, *spread, *normalised, *views, *picked)]

    for dtype in (torch.float32, torch.float16):
        s = torch.tensor(2.5, dtype=dtype)
        yield from differences(f"{dtype}", stitch(reductions, folder)(s), reductions(s), 1e-3)


def checkpoints_with_random_numbers(folder: Path) -> Iterator[str]:
    """Higher-order operators, for which traces record no fake value."""

    def checkpointed(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda y: F.dropout(y.exp(), 0.5), x, use_reentrant=False)
        return y * 2

    for compiled in (stitch(checkpointed, folder), by_backend(checkpointed)):
        x = torch.zeros(64, requires_grad=True)
        result = compiled(x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        yield from differences("gradient", gradient, result)  # exp(0) = 1: both are the mask
        if not 0 < int((result == 4).sum()) < 64:
            yield f"the mask is {result.tolist()}"


def masks_of_integers(folder: Path) -> Iterator[str]:
    """Bitwise operators of bools and integers, all fused."""

    def masks(a: Tensor, b: Tensor, q: Tensor) -> tuple[Tensor, ...]:
        return (
            *(a & b, a | b, a ^ b, ~a, a & True, False | b, a ^ a),
            q.masked_fill(~(a & b) | (a ^ b), -1e9).softmax(-1),
        )

    def bits(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        shifted = x << 3, x >> 2, 1 << (y & 7), x << y, x >> y, torch.bitwise_right_shift(x, 9)
        return x & y, x | y, x ^ y, ~x, x & 12, 12 | y, x & (x > 3), *shifted

    a, b, q = torch.randn(4, 6) > 0, torch.randn(6) > 0, torch.randn(4, 6)
    compiled = stitch(masks, folder)
    yield from differences("bool", compiled(a, b, q), masks(a, b, q))
    yield from map(str, compiled.unfused)
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
        x, y = torch.arange(-40, 60).to(dtype), torch.arange(-3, 97).to(dtype)
        compiled = stitch(bits, folder)
        yield from differences(f"{dtype}", compiled(x, y), bits(x, y))
        yield from map(str, compiled.unfused)


def negative_and_conjugate_bits(folder: Path) -> Iterator[str]:
    """Inputs and intermediate values whose memory holds the negative or the conjugate."""

    def function(x: Tensor) -> Tensor:
        return x.exp() * 2

    def of_complex(z: Tensor) -> tuple[Tensor, ...]:
        c = z.conj()
        return c.imag * 2, torch.view_as_real(c.resolve_conj()).sum(-1), c.real.exp(), c * 1

    x, z = torch.randn(2, 3), torch.randn(2, 3, dtype=torch.complex64)
    for negative in (torch._neg_view(x), z.conj().imag, torch._neg_view(x).t()):
        for compiled in (stitch(function, folder), by_backend(function)):
            yield from differences("negative", compiled(negative), function(negative))
    for complex_ in (z, z.conj()):
        results, expected = stitch(of_complex, folder)(complex_), of_complex(complex_)
        results, expected = (
            [torch.view_as_real(x) if x.is_complex() else x for x in y] for y in (results, expected)
        )
        yield from differences("complex", results, expected)
    compiled = stitch(function, folder)
    for value in (x, torch._neg_view(x), x):
        yield from differences("changing", compiled(value), function(value))


def gathered_values(folder: Path) -> Iterator[str]:
    """Gathers of one element a row, which keep its bits."""
    special = torch.tensor([[-0.0, 1.0, 5.0], [float("-inf"), float("nan"), 2.0], [3.0, 0.0, -7.0]])
    index = torch.tensor([[0], [1], [2]])

    def gather(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return x.gather(1, index), x.gather(0, index.t()), x.gather(1, index * 0)

    for dtype in (torch.float32, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool):
        x = special.nan_to_num(0.0, 3.0, -3.0) if not dtype.is_floating_point else special
        x = (x.abs() if dtype == torch.uint8 else x).to(dtype)
        compiled = stitch(gather, folder)
        yield from differences(f"{dtype}", compiled(x, index), gather(x, index))
        yield from map(str, compiled.unfused)


def indices_out_of_range(folder: Path) -> Iterator[str]:
    """Labels and indices that PyTorch refuses."""

    def loss(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t)

    def gather(x: Tensor, t: Tensor) -> Tensor:
        return x.exp().gather(1, t[:, None])

    def scatter(x: Tensor, t: Tensor) -> Tensor:
        return x.exp().scatter(1, t[:, None], 1.0)

    def embedding(x: Tensor, t: Tensor) -> Tensor:
        return F.embedding(t, x).exp()

    x = torch.randn(3, 5)
    for function in (loss, gather, scatter, embedding):
        for compiled in (stitch(function, folder), by_backend(function)):
            right = torch.tensor([0, 2, 1])
            yield from differences(function.__name__, compiled(x, right), function(x, right))
            for wrong in (torch.tensor([0, 5, 1]), torch.tensor([0, -1, 1])):
                try:
                    compiled(x, wrong)
                except Exception:
                    continue
                yield f"{function.__name__} takes {wrong.tolist()}"
    ignored = torch.tensor([-100, 2, 4])
    yield from differences("ignored", stitch(loss, folder)(x, ignored), loss(x, ignored))


def more_operators(folder: Path) -> Iterator[str]:
    """Operators that become several of nostall's, all fused."""

    def composed(x: Tensor, y: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        a, b = x.chunk(2, -1)
        column = y[:, :1].contiguous()
        return (
            *(torch.cat((-b, a), -1), torch.cat((x, y, x)), torch.stack((x, y), 1)),
            *(
                x.repeat(2, 1),
                x.repeat(3, 1, 2),
                torch.linalg.vector_norm(x, dim=-1),
            ),
            *(x.argmax(-1), x.argmin(0), *x.max(-1), *x.min(0, keepdim=True), x.max(), x.prod()),
            *(x.div(y, rounding_mode="floor"), x.div(y, rounding_mode="trunc"), x // 0.3),
            *(torch.fmax(x, y), torch.fmin(x, y), x.scatter(1, i, column)),
            *(x.scatter_add(1, i, column), x.sinh() + y.cosh(), x.atan2(y)),
        )

    x, y = torch.randn(2, 4, 6)
    i = torch.tensor([[0], [5], [2], [2]])
    special = torch.tensor([[float("nan"), 1.0, 2.0, float("nan"), 0.0, -0.0]]).repeat(4, 1)
    compiled = stitch(composed, folder)
    for left, right in ((x, y), (x, special), (special, y), (x.round(), y.round())):
        yield from differences("", compiled(left, right, i), composed(left, right, i), 1e-4, False)
    yield from map(str, compiled.unfused)


PROGRAMS: dict[str, Program] = {
    "more operators": more_operators,
    "gathered values": gathered_values,
    "indices out of range": indices_out_of_range,
    "results in shared memory": results_in_shared_memory,
    "scalars": scalars,
    "checkpoints with random numbers": checkpoints_with_random_numbers,
    "masks of integers": masks_of_integers,
    "negative and conjugate bits": negative_and_conjugate_bits,
    "narrow floats that are compared": narrow_floats_that_are_compared,
    "python numbers": python_numbers,
    "several dtypes": several_dtypes,
    "attention": attention,
    "operators that inductor computes": operators_that_inductor_computes,
    "weights beside a dynamic batch": weights_beside_a_dynamic_batch,
}


def run_program(program: Program, folder: Path) -> list[str]:
    torch.manual_seed(0)
    try:
        return list(program(folder))
    except Exception as error:  # one failing program must not hide the others
        return [f"{type(error).__name__}: {str(error)[:500]}"]


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["NOSTALL_HOME"] = str(folder)
    warnings.simplefilter("ignore")
    prepare()
    names = sys.argv[2:] or PROGRAMS
    print(json.dumps({name: run_program(PROGRAMS[name], folder) for name in names}))


if __name__ == "__main__":
    main()
