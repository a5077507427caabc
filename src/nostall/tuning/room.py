"""What a search may find in a kernel, said before any: its modelled bound, and measured gains.

``python -m benchmarks page sass`` writes ``gains.json`` from committed measurements.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from importlib import resources
from statistics import geometric_mean, median
from typing import Literal, get_args

from pydantic import Field

from nostall.core import LaunchSpec
from nostall.core.launch import StrictModel
from nostall.sass import Function, Program
from nostall.sass.model import SmModel
from nostall.sass.model.agreement import RANKING_WORTH
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Effect, Pipe
from nostall.sass.schedule import Schedule

GAINS_FILE = "gains.json"
Kind = Literal["wgmma", "mma", "no matrix instructions"]
Search = Literal["native moves", "assembler"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SEARCHES: Mapping[Search, str] = {
    "native moves": "moves of native instructions",
    "assembler": "searches of what ptxas is given",
}
_TCGEN05 = re.compile(r"UTC\w*MMA")
_MEMORY = Effect.ACCESS & ~(Effect.READ_LOCAL | Effect.WRITE_LOCAL)


class Gains(StrictModel):
    """Best measured gain of each kernel, by search and kind of kernel."""

    gpus: dict[Search, tuple[str, ...]]
    """The GPUs that measured."""
    sources: tuple[str, ...]
    """Names of the result files."""
    best: dict[Search, dict[Kind, dict[str, float]]] = Field(min_length=1)
    """Search -> kind -> kernel -> time of the original / time of the best result of all seeds."""

    def sentence(self, search: Search, kind: Kind) -> str:
        """The gains of kernels of a kind in one sentence."""
        values = list(self.best[search][kind].values())
        gpus = ", ".join(self.gpus[search])
        return (
            f"{SEARCHES[search]} gained {median(values):.3f}x in the median and {max(values):.3f}x "
            f"at most on {len(values)} kernels with {kind} (measured, {gpus})"
        ).replace("with no", "without")

    def mean(self, search: Search, kind: Kind) -> float:
        """Geometric mean of the gains of a kind."""
        return geometric_mean(self.best[search][kind].values())

    def largest(self, search: Search, kind: Kind) -> float:
        """The largest gain of a kind."""
        return max(self.best[search][kind].values())


def load_gains() -> Gains:
    """Read the committed gains."""
    file = resources.files("nostall.tuning") / GAINS_FILE
    return Gains.model_validate_json(file.read_text())


def kind_of(function: Function) -> Kind:
    """The kind of a kernel by its matrix instructions; tcgen05 counts as wgmma, the nearest."""
    pipes = {instruction.pipe for instruction in function.instructions}
    if Pipe.GMMA in pipes or any(_TCGEN05.match(i.base) for i in function.instructions):
        return "wgmma"
    return "mma" if Pipe.MMA in pipes else "no matrix instructions"


def modelled_bound(program: Program, function: Function, launch: LaunchSpec) -> dict[str, float]:
    """Parts of the modelled warp cycles by what they are spent on, the largest first.

    ``issue``: issuing, or waiting for an issue slot; ``dependence``: waiting for a result of
    arithmetic; ``memory``: for one of memory or for its queue; ``pipes``: for a busy unit;
    ``barriers``: for other warps.  Raises the errors of :class:`.SmModel`.
    """
    explanation = SmModel(program, function, launch).explain(Schedule.from_function(function))
    spent: Counter[str] = Counter()
    writers: dict[int, Instruction] = {}
    for instruction in function.instructions:
        awaited = [writers[sb] for sb in instruction.control.waits if sb in writers]
        waits_for_memory = any(writer.effects & _MEMORY for writer in awaited)
        row = dict(zip(explanation.reasons, explanation.cycles[instruction.index], strict=True))
        spent["issue"] += row["issued"] + row["not selected"] + row["bank conflict"]
        spent["dependence"] += row["stall count"]
        spent["memory" if waits_for_memory else "dependence"] += row["scoreboard"]
        spent["memory" if instruction.effects & _MEMORY else "pipes"] += row["pipe busy"]
        spent["barriers"] += row["barrier"]
        for scoreboard in (instruction.control.write_sb, instruction.control.read_sb):
            writers[scoreboard] = instruction
    total = spent.total()
    return {name: round(cycles / total, 4) for name, cycles in spent.most_common()}


def describe_bound(bound: dict[str, float]) -> str:
    """A modelled bound in one sentence."""
    first, *others = bound.items()
    rest = ", ".join(f"{name} {part:.0%}" for name, part in others if part >= 0.005)
    return (
        f"bound by {first[0]}: {first[1]:.0%} of the warps' cycles"
        f"{f' ({rest})' if rest else ''}; modelled, and the model {RANKING_WORTH}"
    )
