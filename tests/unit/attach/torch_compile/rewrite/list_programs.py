"""Programs over lists of tensors, run with kernels over lists in Triton's interpreter.

Run with TRITON_INTERPRET=1:
``python -m tests.unit.attach.torch_compile.rewrite.list_programs NAME ...``
prints a JSON with one row for each program: its launches, the tensors changed in place, the calls
that stay, and the largest error of an element beside fp64, in units of the dtype's rounding error.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tools.interpreters.triton_interpreter import prepare
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter, RewriteResult
from nostall.attach.torch_compile.rewrite.list_kernels import insert_list_kernels
from nostall.attach.torch_compile.runtime.list_op import LISTS_OP
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.fusion.lists import slots

SHAPES: list[tuple[int, ...]] = [(3,), (1,), (0, 4), (2049,), (17, 129), (1, 1), (64, 64), ()]
Lists = list[list[Tensor]]
fe_add, fe_mul, fe_sub, fe_div = (
    torch._foreach_add,
    torch._foreach_mul,
    torch._foreach_sub,
    torch._foreach_div,
)


@dataclass(frozen=True)
class Program:
    """A function of lists that changes some of them in place, and its inputs."""

    function: Callable[[Lists], Any]
    lists: Callable[[], Lists]
    pointers: int = slots.MAX_POINTERS
    """Pointers that one launch takes; few make short lists need several launches."""


def made(
    count: int, dtypes: Sequence[torch.dtype] = (), shapes: Sequence[tuple[int, ...]] = SHAPES
) -> Callable[[], Lists]:
    """Lists of random tensors; the last one is positive."""

    def make() -> Lists:
        torch.manual_seed(0)
        kinds = [*dtypes, *[torch.float32] * (count - len(dtypes))]
        lists = [[torch.randn(shape).to(kind) for shape in shapes] for kind in kinds]
        return [*lists[:-1], [tensor.abs() + 0.5 for tensor in lists[-1]]]

    return make


def assign(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def adam(lists: Lists) -> None:
    """Adam with a step of one element for each tensor, which is changed, too."""
    parameters, gradients, mean, variance = lists[:4]
    steps = lists[4]
    count = fe_add(steps, 1)
    first = fe_add(mean, fe_mul(fe_sub(gradients, mean), 0.1))
    second = torch._foreach_addcmul(fe_mul(variance, 0.99), gradients, gradients, 0.01)
    bias = fe_div(fe_sub(torch._foreach_pow(0.9, count), 1), -0.1)
    change = fe_div(first, fe_mul(fe_add(torch._foreach_sqrt(second), 1e-3), bias))
    assign(parameters, fe_add(parameters, change, alpha=-0.1))
    assign(mean, first)
    assign(variance, second)
    assign(steps, count)


def adam_lists(shapes: Sequence[tuple[int, ...]] = SHAPES) -> Callable[[], Lists]:
    return lambda: [*made(4, shapes=shapes)(), [torch.full((), 3.0) for _ in shapes]]


def clip(order: float) -> Callable[[Lists], Tensor]:
    """Clipping of gradients, as ``clip_grad_norm_`` does it; returns the norm of all."""

    def function(lists: Lists) -> Tensor:
        norms = torch.cat([x.unsqueeze(0) for x in torch._foreach_norm(lists[0], order)])
        total = torch.linalg.vector_norm(norms, order)
        factor = torch.clamp_max(torch.reciprocal(total + 1e-6), 1.0)
        assign(lists[0], fe_mul(lists[0], factor))
        return total

    return function


def clip_and_update(lists: Lists) -> Tensor:
    """Clipping and an update by the clipped gradients, which are results as well."""
    total = torch.cat([x.unsqueeze(0) for x in torch._foreach_norm(lists[0])]).square().sum().sqrt()
    clipped = fe_mul(lists[0], torch.clamp_max(torch.reciprocal(total + 1e-6), 1.0))
    assign(lists[1], fe_add(lists[1], clipped, alpha=-0.1))
    assign(lists[0], clipped)
    return total


def master_copy(lists: Lists) -> None:
    """Parameters in bf16 with momentum and a copy in fp32."""
    parameters, gradients, master, momentum = lists
    moved = fe_add(fe_mul(momentum, 0.9), gradients)
    updated = fe_add(master, moved, alpha=-0.1)
    assign(parameters, torch.ops.aten._foreach_copy.default(parameters, updated))
    assign(master, updated)
    assign(momentum, moved)


def old_values(lists: Lists) -> Any:
    """A result that is read as well, and old values that are read before and after."""
    before = [tensor * 2 for tensor in lists[0]]
    new = fe_add(lists[0], lists[1])
    norms = torch._foreach_norm(new, 2)
    # The third list depends on the norms of the first one's new values, and on its old values.
    later = fe_mul(fe_sub(lists[0], lists[2]), norms[0])
    assign(lists[0], new)
    assign(lists[2], later)
    return before, new, norms


def twice(lists: Lists) -> None:
    """Tensors of which the first one is read by two slots, and changed by one of them."""
    first, second = lists
    assign(first, fe_add([first[0], first[0], first[2]], second))


def by_own_element(lists: Lists) -> None:
    """A list that is divided by an element of its first tensor."""
    assign(lists[0], fe_div(lists[0], lists[0][0][0]))


def halves(lists: Lists) -> Any:
    """Parts of an old value that are read behind the call that replaces it."""
    new = fe_mul(lists[0], 2.0)
    low, high = lists[0][0].chunk(2)
    difference = low - high
    assign(lists[0], new)
    return difference


def crossed(lists: Lists) -> Any:
    """Two lists of which each kernel reads the other one's old values, and a third reader."""
    first, second = lists
    counted = fe_add(second, 1.0)
    scaled = fe_mul(first, second)
    sums = [(x * y).sum() for x, y in zip(first, counted, strict=True)]
    assign(first, scaled)
    assign(second, counted)
    return sums


def moved_behind(lists: Lists) -> Any:
    """Old values that a copy keeps in a tensor whose own old value is read later."""
    new = fe_add(lists[0], 1.0)
    later = [(x * y).sum() for x, y in zip(new, lists[1], strict=True)]
    assign(lists[1], lists[0])
    assign(lists[0], new)
    return later


def crossed_lists() -> Lists:
    return [made(1, shapes=[(40,)] * 4)()[0], made(1, shapes=[()] * 4)()[0]]


def scaled_by_tensors(lists: Lists) -> Any:
    """Numbers that differ from tensor to tensor, lists of numbers, one tensor for all."""
    numbers = [0.5 + at for at in range(len(lists[0]))]
    scaled = fe_mul(lists[0], numbers)
    return fe_add(torch._foreach_clamp_min(scaled, -0.3), [float(n) for n in numbers])


def shifted_lists() -> Lists:
    """Tensors that begin at odd addresses, and transposed ones."""
    lists = made(3, shapes=[(7,), (2050,), (33, 65), (5, 6)])()
    return [[x[1:] if x.dim() == 1 else x.t() for x in each] for each in lists]


def momentum(lists: Lists) -> None:
    moved = fe_add(fe_mul(lists[1], 0.9), lists[2])
    assign(lists[0], fe_add(lists[0], moved, alpha=-0.1))
    assign(lists[1], moved)


def loop(lists: Lists) -> Any:
    """Momentum and a moving average, tensor by tensor; one tensor's old value is returned."""
    rate = lists[3][1] * 0.1
    for parameter, moment, gradient in zip(*lists[:3], strict=True):
        moved = moment * 0.9 + gradient
        parameter.copy_(parameter - moved * rate)
        moment.copy_(moved)
    for average, value in zip(lists[3], lists[2], strict=True):
        average.copy_(torch.add(average * 0.99, value, alpha=0.01))
    return lists[2][0] * 2


def extreme(value: float) -> Callable[[], Lists]:
    """Gradients of which one holds a NaN or an infinity."""

    def make() -> Lists:
        lists = made(2, shapes=[(5,), (3000,), (2, 2)])()
        lists[0][1][2999] = value
        return lists

    return make


def random_program(seed: int) -> Program:
    """A random expression of lists, some of whose values are assigned to arguments."""
    unary = [torch._foreach_neg, torch._foreach_abs, torch._foreach_exp, torch._foreach_sigmoid]
    binary = [fe_add, fe_sub, fe_mul, torch._foreach_maximum, torch._foreach_minimum]

    def function(lists: Lists) -> Any:
        draw = random.Random(seed)
        values = list(lists)
        for _ in range(draw.randint(2, 7)):
            kind = draw.random()
            x, y = draw.choice(values), draw.choice(values)
            if kind < 0.35:
                values.append(draw.choice(unary)([t.clamp(-2, 2) for t in x] if kind < 0.1 else x))
            elif kind < 0.7:
                values.append(draw.choice(binary)(x, y))
            elif kind < 0.85:
                values.append(torch._foreach_addcmul(x, y, draw.choice(values), 0.3))
            else:
                values.append(fe_mul(x, torch._foreach_norm(y, draw.choice([1, 2]))[1]))
            values[-1] = torch._foreach_clamp_max(torch._foreach_clamp_min(values[-1], -4), 4)
        targets = draw.sample(range(len(lists)), draw.randint(1, len(lists)))
        chosen = [draw.choice(values[len(lists) :]) for _ in targets]
        for target, value in zip(targets, chosen, strict=True):
            assign(lists[target], value)
        return values[-1] if draw.random() < 0.3 else []

    draw = random.Random(-seed)
    shapes = [draw.choice(SHAPES[:2] + SHAPES[3:7]) for _ in range(draw.randint(1, 5))]
    return Program(function, made(3, shapes=shapes))


PROGRAMS = {
    "adam": Program(adam, adam_lists()),
    "adam in launches": Program(adam, adam_lists(), pointers=14),
    "norm 1": Program(clip(1.0), made(2)),
    "norm 2": Program(clip(2.0), made(2)),
    "norm inf": Program(clip(float("inf")), made(2, shapes=[(5,), (3000,), (2, 2)])),
    "norm in launches": Program(clip(2.0), made(2), pointers=4),
    "norm 2 of NaN": Program(clip(2.0), extreme(float("nan"))),
    "norm inf of NaN": Program(clip(float("inf")), extreme(float("nan"))),
    "norm 2 of infinity": Program(clip(2.0), extreme(float("inf"))),
    "norm inf of infinity": Program(clip(float("inf")), extreme(float("-inf"))),
    "clipped update": Program(clip_and_update, made(2)),
    "bf16 norm": Program(clip(2.0), made(2, [torch.bfloat16])),
    "master copy": Program(master_copy, made(4, [torch.bfloat16, torch.bfloat16])),
    "old values": Program(old_values, made(3)),
    "twice": Program(twice, made(2, shapes=[(6,)] * 3)),
    "own element": Program(by_own_element, made(1, shapes=[(5000,)] * 3)),
    "halves": Program(halves, made(1, shapes=[(8,)] * 3)),
    "crossed": Program(crossed, crossed_lists),
    "moved behind": Program(moved_behind, made(2, shapes=[(6,)] * 3)),
    "numbers": Program(scaled_by_tensors, made(1)),
    "loop": Program(loop, made(4, shapes=[(7,), (1,), (2049,), (17, 9), (3, 3), (5,)])),
    "odd addresses": Program(momentum, shifted_lists),
    **{f"random {seed}": random_program(seed) for seed in range(int(os.environ.get("SEEDS", 12)))},
}


def run(program: Program) -> dict[str, Any]:
    """Run a program with kernels over lists, and compare it with fp64."""
    slots.MAX_POINTERS = program.pointers
    start = time.perf_counter()
    lists = program.lists()
    exact = [[x.detach().clone().double() for x in each] for each in lists]
    eager = [[x.detach().clone() for x in each] for each in lists]
    wanted = _tensors(program.function(exact), exact)
    in_eager = _tensors(program.function(eager), eager)
    module = make_fx(program.function, tracing_mode="fake")(lists)
    result = RewriteResult()
    lines = insert_list_kernels(module, KernelStore(), KernelFilter(), result)
    module.graph.lint()
    found = _tensors(module(lists), lists)
    store = KernelStore()
    records = [store.load_kernel(name)[0] for name in result.kernels]
    return {
        "kernels": len(result.kernels),
        "called": sum(node.target is LISTS_OP for node in module.graph.nodes),
        "launches": sum(len(record.launches) for record in records),
        "changed": sum(record.mutated for record in records),
        "copies": sum("copy_" in str(node.target) for node in module.graph.nodes),
        "stay": {f"{name}: {reason}": n for (reason, name), n in result.not_fused.items()},
        "error": _error(found, wanted),
        "eager error": _error(in_eager, wanted),
        "lines": lines,
        "seconds": round(time.perf_counter() - start, 2),
    }


def _tensors(returned: Any, lists: Lists) -> list[Tensor]:
    from torch.utils._pytree import tree_leaves

    return [*(x for x in tree_leaves(returned) if x is not None), *(t for x in lists for t in x)]


def _error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest error in units of the dtype's rounding error; -1 if a NaN or infinity differs."""
    largest = 0.0
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        b = b.to(a.dtype).double() if a.dtype != torch.float64 else b
        unit = torch.finfo(a.dtype).eps
        x = a.double()
        special = ~(x.isfinite() & b.isfinite())
        if not torch.equal(x[special].nan_to_num(7.0), b[special].nan_to_num(7.0)):
            return -1.0
        apart = ((x - b).abs() / b.abs().clamp(min=1.0) / unit)[~special]
        largest = max([largest, *apart.reshape(-1).tolist()])
    return largest


def main() -> None:
    """Run the programs that the arguments name."""
    prepare()
    torch.set_num_threads(1)
    os.environ["NOSTALL_HOME"] = tempfile.mkdtemp()
    print(json.dumps({name: run(PROGRAMS[name]) for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
