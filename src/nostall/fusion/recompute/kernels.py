"""The kernels that a region is stitched with: the partition, with values computed again.

Values that kernels compute again because that moves fewer bytes than to store and read them.

Each operator of a partition belongs to one kernel.  A kernel that computes the variance of ``x`` in
bf16 would write ``x`` in fp32 for the kernel that normalises it, which moves more bytes than to
read ``x`` again.  Operators that are light are copied into each kernel that reads their results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from nostall.fusion.explore.default_partition import default_partition
from nostall.fusion.explore.kernel_splitting import KernelTimes
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.recompute.copies import MAX_COPIES, NOT_COPIED, GraphCopier, Group, Kernels
from nostall.fusion.recompute.partial_reads import read_nested_parts
from nostall.fusion.recompute.rounding import may_change_decisions

MAX_TRIALS = 16
"""Values of one graph that are tried; planning two kernels takes some 100 ms."""
MAX_TIME_RATIO = 0.97
"""A value is computed again if the kernels' modelled time is below this share of that without."""
LARGE_BYTES, MORE_TIME = 4 << 20, 0.02
"""Values of so many bytes, whose memory a step then does not need, may take so much of the modelled
time of all kernels more, together."""


def recompute_shared_values(kernels: Kernels) -> Kernels:
    """The same kernels, with values computed by each reader where that takes less modelled time,
    or less memory and hardly more time.

    Kernels that exchange values of the region's graph only still do so.
    """
    trials, refused = 0, set[_Key]()
    times = KernelTimes(kernels.graph)
    allowed = MORE_TIME * (times.total(kernels.groups) or 0.0)
    while trials < MAX_TRIALS:
        change = next(_changes(kernels, refused), None)
        if change is None:
            break
        if not change.kernels.store_known_values:
            refused.add(change.key)
            continue
        trials += 1
        changed_times = KernelTimes(change.kernels.graph)
        before, after = times.total(change.before), changed_times.total(change.after)
        is_large = kernels.graph[change.key[0]].bytes >= LARGE_BYTES
        more = math.inf if before is None or after is None else after - before
        if more < (MAX_TIME_RATIO - 1) * (before or 0.0) or (is_large and more <= allowed):
            allowed -= max(0.0, more)
            kernels, times = change.kernels, changed_times
            refused = {change.translated(key) for key in refused}
        else:
            refused.add(change.key)
    return kernels


_Key = tuple[int, Group]
"""A shared value and the kernel that computes it, in the graph of the current kernels."""


@dataclass(frozen=True)
class _Change:
    """Kernels of which some compute a value again."""

    key: _Key
    kernels: Kernels
    before: tuple[Group, ...]
    """The kernels that change, as they are without the copies."""
    after: tuple[Group, ...]
    """The same kernels with the copies."""
    repeated: frozenset[int]
    """The copied operators that several of these kernels compute."""
    position: Mapping[int, int]
    """The node of the changed graph for each node of the graph."""

    def translated(self, key: _Key) -> _Key:
        """The same value and operators in the changed graph."""
        value, group = key
        return self.position[value], tuple(sorted(self.position[index] for index in group))


def _changes(kernels: Kernels, refused: set[_Key]) -> Iterator[_Change]:
    """Changes, those of the value of the most bytes first."""
    graph, owner = kernels.graph, kernels.owner
    shared = [
        index
        for index, at in owner.items()
        if index not in graph.results and any(owner.get(i) != at for i in graph.consumers[index])
    ]
    for index in sorted(shared, key=lambda i: (-graph[i].bytes, i)):
        key = (index, kernels.groups[owner[index]])
        if key in refused or any(reader not in owner for reader in graph.consumers[index]):
            continue
        sources = _Sources(kernels, index)
        copied = sources.copied()
        change = _with_copies(kernels, key, copied, sources.readers) if copied else None
        if change and not may_change_decisions(graph, change.repeated, change.repeated):
            yield change


@dataclass
class _Sources:
    """What the readers of a shared value would read and what they would compute again."""

    kernels: Kernels
    value: int
    _costs: dict[int, tuple[float, bool]] = field(default_factory=dict)
    """Bytes that a node costs, and whether it is copied."""

    def __post_init__(self) -> None:
        graph, groups, owner = self.kernels.graph, self.kernels.groups, self.kernels.owner
        self.readers = {owner[i] for i in graph.consumers[self.value]} - {owner[self.value]}
        self._reads = {
            at: {i for index in groups[at] for i in graph.sources[index] if owner.get(i) != at}
            for at in self.readers
        }

    def copied(self) -> set[int]:
        """The operators to copy; empty if to store the value moves fewer bytes."""
        graph = self.kernels.graph
        stored = graph[self.value].bytes * (1 + len(self.readers))
        found, pending = set[int](), [self.value]
        while pending:
            index = pending.pop()
            if index not in found and self._cost(index)[1]:
                found.add(index)
                pending.extend(graph.sources[index])
        # Each of them is read once, however many copied operators read it.
        read = {i for index in found for i in graph.sources[index]} - found
        is_less = sum(self._cost(index)[0] for index in read) <= stored
        return found if is_less and len(found) <= MAX_COPIES else set()

    def _cost(self, index: int) -> tuple[float, bool]:
        if index not in self._costs:
            self._costs[index] = self._compute_cost(index)
        return self._costs[index]

    def _compute_cost(self, index: int) -> tuple[float, bool]:
        graph = self.kernels.graph
        node = graph[index]
        stored = math.inf
        if index != self.value:
            stored = node.bytes * sum(index not in reads for reads in self._reads.values())
            stored += 0 if self._is_in_memory(index) else node.bytes
        if node.kind != "light" or node.op in NOT_COPIED:
            return stored, False
        copied = sum(self._cost(source)[0] for source in graph.sources[index])
        return min(stored, copied), copied <= stored

    def _is_in_memory(self, index: int) -> bool:
        graph, owner = self.kernels.graph, self.kernels.owner
        if graph[index].kind not in COMPUTE or index in graph.results:
            return True
        return any(owner.get(i) != owner.get(index) for i in graph.consumers[index])


def _with_copies(kernels: Kernels, key: _Key, copied: set[int], readers: set[int]) -> _Change:
    """The kernels with copies of operators in each kernel of ``readers``."""
    graph, owner = kernels.graph, kernels.owner
    copier = GraphCopier(graph, kernels.origins)
    added: dict[int, list[int]] = {at: [] for at in readers}
    known: dict[tuple[int, int], int] = {}

    def operand(index: int, at: int) -> int:
        """The node of the copy that a reader's operand is read from."""
        if graph.base(index) not in copied:
            return copier.position[index]
        if (index, at) not in known:
            inputs = [operand(i, at) for i in graph[index].inputs]
            known[index, at] = copier.copy(index, inputs)
            added[at] += [known[index, at]] if index in copied else []
        return known[index, at]

    for node in graph:
        at = owner.get(node.index, -1)
        inputs = [operand(i, at) if at in readers else copier.position[i] for i in node.inputs]
        copier.keep(node.index, inputs)
    result, origins = copier.finish()
    live = set(result.operators)
    groups = [
        {copier.position[i] for i in group} | set(added.get(at, ()))
        for at, group in enumerate(kernels.groups)
    ]
    kept = [tuple(sorted(group & live)) for group in groups]
    # Other kernels compute copied operators no longer, or write what the copies read.
    touched = {*copied, *(i for index in copied for i in graph.sources[index])}
    involved = readers | {owner[index] for index in touched if index in owner}
    return _Change(
        key,
        Kernels(result, tuple(group for group in kept if group), origins),
        tuple(kernels.groups[at] for at in sorted(involved)),
        tuple(kept[at] for at in sorted(involved) if kept[at]),
        frozenset(
            index
            for index in copied
            if (copier.position[index] in live) + sum((index, at) in known for at in readers) > 1
        ),
        copier.position,
    )


# A region is explored once, and its kernels are tuned later.
@lru_cache(maxsize=8)
def default_kernels(graph: Graph) -> Kernels:
    """The kernels of a region, by the explorer's partition with copies where they gain (modelled).

    First, parts of computed values are computed from parts of their operands.  Then light operators
    are copied into the kernels that read their results.
    """
    kernels = Kernels.of(graph, default_partition(graph))
    with_parts = _kernels_of_parts(graph)
    if with_parts is not None:
        before = KernelTimes(graph).total(kernels.groups)
        after = KernelTimes(with_parts.graph).total(with_parts.groups)
        if before is not None and after is not None and after < MAX_TIME_RATIO * before:
            kernels = with_parts
    return recompute_shared_values(kernels)


def _kernels_of_parts(graph: Graph) -> Kernels | None:
    """The kernels of the graph whose parts of values are computed on their own, if it has any."""
    found = read_nested_parts(graph)
    if found is None:
        return None
    changed, origins = found
    kernels = Kernels(changed, tuple(map(tuple, default_partition(changed))), origins)
    return kernels if kernels.store_known_values else None
