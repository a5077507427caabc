"""What became of each graph: for users who ask, and for benchmarks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from nostall.attach.torch_compile.store.records import ComparisonRecord

State = Literal["inductor", "compiling", "stitched"]


@dataclass
class GraphReport:
    """One graph that Dynamo handed over.

    ``state`` is what its calls run now.  ``refused`` counts (reason, operator) of what was left to
    others, ``left`` the kernels among it because what Inductor makes is not slower.  ``seconds``:
    wall time of compiling the plain and the stitched version and of comparing them (``written``,
    ``compiled``: of another process, which writes kernels and has them compiled; ``ahead``: of
    those that have Inductor compile before the program does, added up; ``not_ahead`` says why none
    did); ``cpu_seconds``: processor time of all that the graph's stitched version took: the threads
    that stitched and compared, those processes with all that work for them, ptxas, and Inductor's
    processes while they compiled it (with whatever other process the program has waited for
    meanwhile; graphs that are stitched at the same time share what processes took, and what one did
    in vain is that graph's which chooses last).  The version that runs first is the program's own.
    """

    graph: str = ""
    state: State = "inductor"
    reason: str = ""
    kernels: int = 0
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    left: int = 0
    compared: ComparisonRecord | None = None
    from_store: bool = False
    calls: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    not_ahead: str = ""
    cpu_seconds: float = 0.0

    def add_cpu_seconds(self, seconds: float) -> None:
        self.cpu_seconds += seconds

    def __str__(self) -> str:
        told = f"graph {self.graph[:8] or '?'}: {self.state}"
        if self.kernels:
            told += f", {self.kernels} stitched kernels"
        if self.left:
            told += f", {self.left} left to Inductor"
        if self.compared is not None:
            c = self.compared
            told += f", {c.kind} {c.ratio:.3f}x ({c.low:.3f} to {c.high:.3f})"
        if self.cpu_seconds:
            told += f", {self.cpu_seconds:.1f} s of processor time"
        return f"{told}; {self.reason}" if self.reason else told

    def explain(self) -> str:
        """What was left to others and why, one line for each reason."""
        lines = [str(self)]
        for (why, what), count in sorted(self.refused.items(), key=lambda r: (-r[1], r[0])):
            lines.append(f"  {count:4} x {what}: {why}")
        if self.not_ahead:
            lines.append(f"  compiled by the program itself: {self.not_ahead}")
        return "\n".join(lines)
