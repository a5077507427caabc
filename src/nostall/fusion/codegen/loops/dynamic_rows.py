"""A number of rows that is known at run time only: where one source does for all of them.

Source text holds sizes and strides as numbers, except that the loop with the longest steps never
stands in it: only the count that a kernel is given says where it ends.  So what varies has to be
that loop, and must not change a stride.
"""

from __future__ import annotations

from collections.abc import Iterator

from nostall.fusion.codegen.loops.addresses import offset
from nostall.fusion.codegen.loops.mapping import Place
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.dynamic_size import varies
from nostall.fusion.graph.graph import Node
from nostall.fusion.graph.shapes import Shape, contiguous_strides


def check_varying(of: Schedule) -> None:
    """Raises :class:`BadFusion` where a kernel's source would depend on the varying size."""
    mapping, varying = of.mapping, of.mapping.graph.varying
    if varying is None:
        return
    loops = [loop for loop, size in enumerate(mapping.sizes) if varies(size, varying)]
    if len(loops) > 1 or any(varies(mapping.sizes[n] // varying, varying) for n in loops):
        raise BadFusion("several loops vary with the dynamic size; leave them to PyTorch")
    if any(loop in of.columns for loop in loops):
        raise BadFusion("a dynamic size is reduced; leave it to PyTorch")
    if any(loop in of.rows[1:] for loop in loops):
        raise BadFusion(
            "the dynamic size is not the slowest axis in memory; put it first and make tensors "
            "contiguous"
        )
    if of.tails and loops and of.summed != of.rows:
        raise BadFusion(
            "sums over a part of the rows beside a dynamic number of them; give them a kernel of "
            "their own"
        )
    for node, places, strides in _addresses(of):
        found = offset(places, strides, mapping.sizes)
        if any(varies(n, varying) for n in (found.start, *found.weights.values())):
            raise BadFusion(
                f"{node}: strides depend on the dynamic size; put it first and make tensors "
                "contiguous"
            )


def _addresses(of: Schedule) -> Iterator[tuple[Node, tuple[Place, ...], Shape]]:
    """Whatever the source counts from a place: memory that is read or written, and counters."""
    mapping = of.mapping
    graph = mapping.graph
    for index in mapping.outputs:
        yield graph[index], mapping.places[index], graph[index].strides
    for index in mapping.operators:
        if graph[index].op == "random":
            yield graph[index], mapping.places[index], contiguous_strides(graph[index].shape)
    for operand in dict.fromkeys(o for i in mapping.operators for o in mapping.operands[i]):
        if mapping.is_outside(operand):
            yield graph[operand.source], operand.places, graph[operand.source].strides
        elif graph[operand.source].op == "iota":
            yield graph[operand.source], operand.places, (1,)
