"""Kernels with dynamic sizes as arguments: one source for all sizes.

Emitters write every size and stride as a literal.  A kernel is therefore written several times, for
graphs that differ in their sizes only.  Where the texts differ, they have to differ by literals
that are products of the sizes; these become products of arguments.  Any other difference means that
the source is valid for some sizes only.  The sizes differ by much, so that a loop which a small
size would end after its first iteration is in one of the texts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from nostall.fusion.codegen.emit.program import Launch
from nostall.fusion.codegen.loops.mapping import map_pattern
from nostall.fusion.codegen.loops.schedule import build_schedule
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.dynamic_size import factors, placeholder_prime, primes_of, resized
from nostall.fusion.graph.graph import MAX_ELEMENTS, Graph

Write = Callable[[PlannedKernel], tuple[str, Launch]]
"""Writes the body of a kernel and its launch."""

SMALL_SIZE, LARGE_FACTOR = 5, 64
"""Other sizes for which a kernel is written: about 5, and this many times the expected size."""

_COMMENT = re.compile("#.*")
_LITERAL = re.compile(r"(?<![\w.])\d+(?![\w.])")


def write_with_sizes(kernel: PlannedKernel, write: Write) -> tuple[str, Launch]:
    """The body and the launch of a kernel whose last arguments are the dynamic sizes it reads.

    Raises :class:`BadFusion` if the source is valid for some sizes only.
    """
    graph = kernel.schedule.mapping.graph
    varying = graph.varying
    assert varying is not None
    body, launch = write(kernel)
    literals = _LITERAL.findall(body)
    dynamic: set[int] = set()
    for sizes in _other_sizes(graph, varying):
        other_body, other_launch = write(_with_sizes(kernel, sizes))
        others = _LITERAL.findall(other_body)
        expected = [resized(n, varying, sizes) for n in (*launch.counts, *launch.grid)]
        if _form(body) != _form(other_body) or expected != [
            *other_launch.counts,
            *other_launch.grid,
        ]:
            raise BadFusion("the form of the source depends on the dynamic sizes")
        for at, (text, other) in enumerate(zip(literals, others, strict=True)):
            if text != other and resized(int(text), varying, sizes) != int(other):
                raise BadFusion(
                    "a number of the source depends on the dynamic sizes by more than a product"
                )
            if text != other:
                dynamic.add(at)
    primes = primes_of(varying)
    used = sorted({at for n in dynamic for at in _places(int(literals[n]), varying)})
    names = {at: f"n{place}" for place, at in enumerate(used)}
    numbers = iter(enumerate(literals))

    def text_of(_: re.Match[str]) -> str:
        at, text = next(numbers)
        return _product(int(text), varying, names) if at in dynamic else text

    return _LITERAL.sub(text_of, body), replace(
        launch,
        counts=(*launch.counts, *(primes[at] for at in used)),
        count_names=(*launch.count_names[: len(launch.counts)], *names.values()),
        specializes_counts=False,
    )


def _form(body: str) -> str:
    """The text without its literals and comments."""
    return _LITERAL.sub("0", _COMMENT.sub("", body))


def _product(number: int, varying: int, names: dict[int, str]) -> str:
    """A number as a product of sizes.  Triton sees the constant factor: it may align accesses."""
    constant, _ = factors(number, varying)
    parts = [names[at] for at in _places(number, varying)]
    return f"({' * '.join([*parts, *([str(constant)] if constant > 1 else [])])})"


def _places(number: int, varying: int) -> list[int]:
    """The sizes that a number is the product of, by their place, powers repeated."""
    _, powers = factors(number, varying)
    return [at for at, power in enumerate(powers) for _ in range(power)]


def _other_sizes(graph: Graph, varying: int) -> Iterator[tuple[int, ...]]:
    """Primes for which the kernel is written, too: all a little larger, then one large, the others
    small.  Their order is that of the graph's primes if all are alike, so loops keep their order.
    """
    numbers = {n for node in graph for n in (*node.shape, *node.strides)}
    static = {factors(n, varying)[0] for n in numbers} | set(primes_of(varying))
    primes = primes_of(varying)
    yield _primes_from([prime + 2 for prime in primes], static)
    for large in range(len(primes)):
        factor = LARGE_FACTOR
        while factor > 1:
            expected = [SMALL_SIZE] * len(primes)
            expected[large] = factor * primes[large]
            sizes = _primes_from(expected, static)
            if all(resized(node.elements, varying, sizes) <= MAX_ELEMENTS for node in graph):
                yield sizes
                break
            factor //= 2


def _primes_from(expected: Sequence[int], static: set[int]) -> tuple[int, ...]:
    """Different primes from the expected sizes on."""
    taken: list[int] = []
    for size in expected:
        taken.append(placeholder_prime(size, static.union(taken)))
    return tuple(taken)


def _with_sizes(kernel: PlannedKernel, sizes: tuple[int, ...]) -> PlannedKernel:
    """The kernel of the same operators and the same plan in a graph with these primes."""
    schedule = kernel.schedule
    graph = schedule.mapping.graph
    nodes = tuple(node.resized(graph.varying, sizes) for node in graph)
    resized_graph = replace(graph, nodes=nodes, varying=math.prod(sizes))
    other = build_schedule(map_pattern(resized_graph, schedule.mapping.operators))
    other = replace(
        other,
        allow_online_softmax=schedule.allow_online_softmax,
        allow_online_variance=schedule.allow_online_variance,
        outer_rows=schedule.outer_rows,
    )
    return PlannedKernel(other, kernel.plan)
