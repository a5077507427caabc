"""Check that one kernel source is valid for every value of a dynamic number of rows.

Sizes and strides are literals in the generated source, with one exception: the size of the
slowest loop.  Only the row count, a kernel argument, bounds that loop.  So the dynamic size has to
be the size of the slowest loop, and no stride may depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator

from nostall.fusion.codegen.loops.addresses import tensor_offset
from nostall.fusion.codegen.loops.mapping import AxisAccess
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.dynamic_size import varies
from nostall.fusion.graph.graph import Node
from nostall.fusion.graph.shapes import Shape, contiguous_strides


def check_dynamic_size(schedule: Schedule) -> None:
    """Raises :class:`BadFusion` if the kernel's source would depend on the dynamic size."""
    mapping, varying = schedule.mapping, schedule.mapping.graph.varying
    if varying is None:
        return
    loops = [loop for loop, size in enumerate(mapping.loop_sizes) if varies(size, varying)]
    if len(loops) > 1 or any(varies(mapping.loop_sizes[n] // varying, varying) for n in loops):
        raise BadFusion("several loops vary with the dynamic size; leave them to PyTorch")
    if any(loop in schedule.columns for loop in loops):
        raise BadFusion("a dynamic size is reduced; leave it to PyTorch")
    if any(loop in schedule.rows[1:] for loop in loops):
        raise BadFusion(
            "the dynamic size is not the slowest axis in memory; put it first and make tensors "
            "contiguous"
        )
    if schedule.row_reductions and loops and schedule.reduced_rows != schedule.rows:
        raise BadFusion(
            "sums over some of the row loops cannot have a dynamic number of rows; give them a "
            "kernel of their own"
        )
    for node, accesses, strides in _indexed_tensors(schedule):
        offset = tensor_offset(accesses, strides, mapping.loop_sizes)
        if any(varies(n, varying) for n in (offset.start, *offset.strides.values())):
            raise BadFusion(
                f"{node}: strides depend on the dynamic size; put it first and make tensors "
                "contiguous"
            )


def _indexed_tensors(schedule: Schedule) -> Iterator[tuple[Node, tuple[AxisAccess, ...], Shape]]:
    """Everything that the source computes an offset for, as (node, accesses, strides).

    These are outputs, inputs, random numbers and counters (``iota``).
    """
    mapping = schedule.mapping
    graph = mapping.graph
    for index in mapping.outputs:
        yield graph[index], mapping.accesses[index], graph[index].strides
    for index in mapping.operators:
        if graph[index].op == "random":
            yield graph[index], mapping.accesses[index], contiguous_strides(graph[index].shape)
    for operand in dict.fromkeys(o for i in mapping.operators for o in mapping.operands[i]):
        if mapping.is_in_memory(operand):
            yield graph[operand.source], operand.accesses, graph[operand.source].strides
        elif graph[operand.source].op == "iota":
            yield graph[operand.source], operand.accesses, (1,)
