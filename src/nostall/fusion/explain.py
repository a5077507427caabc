"""What keeps a graph from being fused further: regions, refused calls, and the bytes they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nostall.fusion.capture import CapturedGraph
from nostall.fusion.capture.left_to_pytorch import ATTENTION, LEFT, LISTS, NO_RULE, OWN
from nostall.fusion.graph.graph import Graph
from nostall.fusion.region_plans import captured_regions

BETWEEN_KERNELS = "values that one kernel writes and another reads"
_CHANGES: tuple[tuple[str, str], ...] = (
    (NO_RULE, "needs a lowering rule in nostall; report the operator"),
    ("changes a tensor in place", "compute a new tensor instead of changing one in place"),
    ("reads a tensor that is changed in place", "compute a new tensor instead"),
    ("a copy that is changed in place", "compute a new tensor instead"),
    ("copies between devices", "move tensors before the function"),
    ("tensors on several devices", "move tensors to one GPU before the function"),
    ("dtype ", "use fp32 or narrower floats, or integers"),
    ("a number that is known at run time only", "pass the number as a constant or a tensor"),
    ("a size that is no product", "pad or slice outside of the graph: sizes must be products"),
    ("data-dependent shape", "use masks in place of shapes that depend on values"),
    ("gather or scatter", "index one element of each row"),
    ("concatenation of other", "concatenate 2 to 4 parts of one size"),
    ("matrix product that does not wait", "nothing: it is limited by arithmetic"),
    ("more than 2^31 - 1 elements", "split the tensor"),
    ("sparse tensor", "use dense tensors"),
    ("division of integers", "divide floats, or shift integers"),
    ("random numbers", "dropout and uniform numbers are fused by stitch_function"),
    ("a tensor whose memory holds", "call resolve_neg() or resolve_conj() before the function"),
    (LISTS, "torch.compile has kernels over lists, and says why others stay"),
    (BETWEEN_KERNELS, "nothing: no kernel computes both sides, or the model finds two faster"),
)


@dataclass(frozen=True)
class Refusal:
    """A kind of call that no kernel contains."""

    reason: str
    operator: str
    """The ATen operator; empty if the reason is about kernels."""
    count: int
    bytes: int
    """Bytes that kernels write for these calls only, and read from them: fusing would save them."""

    @property
    def change(self) -> str:
        """What would have to change for the calls to be fused."""
        for start, text in _CHANGES:
            if self.reason.startswith(start):
                return text
        if self.reason == OWN:
            return "nothing: its kernels are nostall's"
        if self.reason in (ATTENTION, *LEFT.values()):
            return "nothing: PyTorch's own kernel is right for it"
        return "see the reason"


@dataclass(frozen=True)
class Explanation:
    """The outcome of fusion for one graph."""

    regions: int
    operators: int
    """Operators in regions."""
    refusals: tuple[Refusal, ...]
    """Those that cost the most bytes first."""

    def lines(self) -> list[str]:
        """The explanation as text, without the bytes of calls that cost none."""
        total = sum(refusal.bytes for refusal in self.refusals)
        lines = [
            f"{self.regions} regions with {self.operators} operators; "
            f"{_megabytes(total)} cross their borders and the borders of kernels"
        ]
        for each in self.refusals:
            name = f"{each.count} x {each.operator}: " if each.operator else ""
            cost = f" [{_megabytes(each.bytes)}]" if each.bytes else ""
            lines.append(f"  {name}{each.reason}{cost}; change: {each.change}")
        return lines


def explain_graph(captured: CapturedGraph, kernels: Sequence[Collection[int]] = ()) -> Explanation:
    """Explain a captured graph. ``kernels``: the operators of each kernel, if they are known."""
    graph, counts, costs = captured.graph, Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    operators = set(graph.operators)
    for index, kind in captured.report.reasons.items():
        counts[kind] += 1
        costs[kind] += _border_bytes(graph, index, operators)
    refusals = [
        Refusal(reason, operator, count, costs[reason, operator])
        for (reason, operator), count in counts.items()
    ]
    if between := _bytes_between(graph, kernels):
        refusals.append(Refusal(BETWEEN_KERNELS, "", 1, between))
    refusals.sort(key=lambda each: (-each.bytes, -each.count, each.reason, each.operator))
    regions = captured_regions(captured)
    return Explanation(len(regions), len(operators), tuple(refusals))


def _border_bytes(graph: Graph, index: int, operators: Collection[int]) -> int:
    """Bytes between an opaque call and kernels: operands that only it reads, and its result."""
    moved = 0
    for source in graph.sources[index]:
        if source in operators and set(graph.consumers[source]) <= {index}:
            is_result = source in graph.results
            moved += graph[source].bytes * (1 if is_result else 2)
    if any(reader in operators for reader in graph.consumers[index]):
        moved += graph[index].bytes * (1 if index in graph.results else 2)
    return moved


def _bytes_between(graph: Graph, kernels: Sequence[Collection[int]]) -> int:
    """Bytes that kernels write and other kernels read; each reader counts.

    A kernel that computes a value again does not read it.
    """
    moved = 0
    owners: dict[int, set[int]] = {}
    for at, kernel in enumerate(kernels):
        for index in kernel:
            owners.setdefault(index, set()).add(at)
    for index, own in owners.items():
        readers = {at for i in graph.consumers[index] for at in owners.get(i, set()) - own}
        if readers:
            moved += graph[index].bytes * (len(readers) + (index not in graph.results))
    return moved


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
