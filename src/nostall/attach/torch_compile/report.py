"""Reports of the backend: for each graph, which version runs and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from nostall.attach.torch_compile.store.records import ComparisonRecord, EarlierComparison

State = Literal["inductor", "compiling", "stitched", "tuned"]


@dataclass
class GraphReport:
    """Outcome of a graph that Dynamo traced.

    The version that runs first is compiled for the user, so its time is not part of
    ``cpu_seconds``.
    """

    # Key of the graph (sha256); empty if the graph is not supported.
    graph: str = ""
    # What calls of the graph run now: Inductor's version, the same while the candidate is prepared,
    # the candidate with stitched kernels, or Inductor's version with measured block sizes.
    state: State = "inductor"
    # Why this version runs; empty until the selection is final.
    reason: str = ""
    # Stitched kernels of the candidate.
    kernels: int = 0
    # What the candidate changes at calls of attention, one line for each reason.
    attention: list[str] = field(default_factory=list)
    # Losses that the candidate computes without logits in memory, one line for each kind.
    loss: list[str] = field(default_factory=list)
    # The same for losses that all versions compute so, because it was asked for.
    chunked: list[str] = field(default_factory=list)
    # Calls of attention and losses that stay as they are, one line for each reason.
    left: list[str] = field(default_factory=list)
    # Operators that are not part of a stitched kernel, counted by (reason, operator).
    not_fused: Counter[tuple[str, str]] = field(default_factory=Counter)
    # What keeps each of Inductor's graphs (forward, backward) from being fused further, as lines.
    explanations: list[list[str]] = field(default_factory=list)
    # Kernels that stay with Inductor because its version of the same operators is not slower.
    kept_in_inductor: int = 0
    # Sizes of the call at which the versions were compared, if sizes are dynamic.
    compared_at: str = ""
    # The outcome at other sizes, one line for each bucket of sizes with a choice of its own.
    at_sizes: list[str] = field(default_factory=list)
    # Kernels that stay with Inductor because they are not accurate, each with operator and error.
    inaccurate: list[str] = field(default_factory=list)
    # What was measured of matrix products with elementwise readers, one line for each.
    products: list[str] = field(default_factory=list)
    # The measured comparison of Inductor's version and the last candidate; None if there was none.
    comparison: ComparisonRecord | None = None
    # The same for candidates before that one, which were not faster.
    earlier: list[EarlierComparison] = field(default_factory=list)
    # The comparison of Inductor's version with measured block sizes and without; None if there is
    # none, and why, or how they were found.
    blocks: ComparisonRecord | None = None
    blocks_note: str = ""
    # Whether the version to beat is the one with these block sizes.
    is_tuned: bool = False
    # Whether the selection was loaded from the store.
    from_store: bool = False
    # Calls until the selection.
    calls: int = 0
    # Wall time by activity, in seconds: compiling the baseline and the candidate ("baseline",
    # "candidate"), threads ("background"), tuning of plans ("plan_tuning"), comparisons of kernels,
    # products and the graph ("kernel_comparison", "products", "graph_comparison"), waiting for
    # workers that generate code ("codegen"), compile kernels ("kernel_compilation") or graphs
    # ("graph_compilation", summed over all workers), and the search of block sizes
    # ("block_tuning").
    seconds: dict[str, float] = field(default_factory=dict)
    # Why no worker process compiled the graph; empty if one did.
    local_only_reason: str = ""
    # CPU time of everything that the candidate took, in seconds: threads of this process, workers,
    # ptxas, and Inductor's compile processes meanwhile.  Graphs that are prepared at the same time
    # share the time of common processes; unused work of workers counts for the last graph.
    cpu_seconds: float = 0.0

    @property
    def is_rewritten(self) -> bool:
        """Whether the candidate has other operators than the graph, before AOTAutograd."""
        return bool(self.attention or self.loss)

    @property
    def blocks_line(self) -> str:
        """What was measured of Inductor's version with measured block sizes; empty if nothing."""
        parts = [self.blocks_note] if self.blocks_note else []
        if self.blocks is not None:
            parts.insert(0, f"{self.blocks.kind} {self.blocks} over its version without")
        return f"Inductor's kernels with tuned blocks: {'; '.join(parts)}" if parts else ""

    def add_seconds(self, activity: str, seconds: float) -> None:
        """Add wall time of an activity."""
        self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds

    def add_cpu_seconds(self, seconds: float) -> None:
        self.cpu_seconds += seconds

    def __str__(self) -> str:
        text = f"graph {self.graph[:8] or '?'}: {self.state}"
        if self.kernels:
            text += f", {self.kernels} stitched kernels"
        if self.kept_in_inductor:
            text += f", {self.kept_in_inductor} kept in Inductor"
        if self.comparison is not None:
            text += f", {self.comparison.kind} {self.comparison}"
        if self.cpu_seconds:
            text += f", {self.cpu_seconds:.1f} s of CPU time"
        return f"{text}; {self.reason}" if self.reason else text

    def explain(self) -> str:
        """The report: regions, calls that are not fused and why, the bytes that costs, and what
        would have to change."""
        lines = [str(self)]
        if self.comparison is not None and self.comparison.memory:
            lines.append(f"  {self.comparison.memory}")
        if self.compared_at:
            lines.append(f"  compared at {self.compared_at}; this version runs at such sizes")
        lines += [f"  at {line}" for line in self.at_sizes]
        lines += [f"  {line}" for line in (*self.attention, *self.loss, *self.chunked, *self.left)]
        for number, explanation in enumerate(self.explanations, 1):
            lines += [f"  graph {number} of Inductor: {explanation[0]}"]
            lines += [f"  {line}" for line in explanation[1:]]
        for (reason, operator), count in sorted(
            self.not_fused.items(), key=lambda item: (-item[1], item[0])
        ):
            if self.explanations and "." in operator:
                continue  # a call, which the explanation of its graph names
            lines.append(f"  {count:4} x {operator}: {reason}")
        lines += [f"  left to Inductor, not accurate: kernel {text}" for text in self.inaccurate]
        if line := self.blocks_line:
            lines.append(f"  {line}")
        if self.products:
            seconds = self.seconds.get("products", 0.0)
            lines.append(f"  matrix products, {seconds:.1f} s of measurements:")
            lines += [f"    {line}" for line in self.products]
        lines += [
            f"  compared before: {each.candidate}, {each.comparison.kind} {each.comparison}"
            for each in self.earlier
        ]
        if self.local_only_reason:
            lines.append(f"  compiled by the user's process: {self.local_only_reason}")
        return "\n".join(lines)
