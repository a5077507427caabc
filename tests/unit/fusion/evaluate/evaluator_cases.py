"""The cost model's benchmark on a small chain in Triton's interpreter, for tests of the benchmark.

    python -m tests.unit.fusion.evaluate.evaluator_cases FOLDER

prints the results as JSON. A fake clock says that a plan takes as many microseconds as it has
warps. One plan writes wrong values on purpose, and one is marked as not compiled.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from benchmarks.fusion.chains.programs import CHAINS, HALF, Chain, norm_gelu_mask
from benchmarks.fusion.cost_model import evaluate, timing
from benchmarks.fusion.cost_model.compile import result_path
from benchmarks.fusion.cost_model.evaluate import Job, measure
from benchmarks.fusion.cost_model.sample import sample_chain
from benchmarks.fusion.cost_model.timing import TimingSettings
from tools.interpreters.triton_interpreter import prepare

from nostall.fusion.codegen.runtime.kernel import StitchedKernel
from nostall.gpu.clock import RecordedClock

ROWS, COLUMNS = 4, 640
CHAIN = Chain(
    "small norm",
    norm_gelu_mask,
    (((ROWS, COLUMNS), HALF), ((COLUMNS,), HALF), ((COLUMNS,), HALF), ((ROWS, COLUMNS), HALF)),
)
MAX_PLANS = 10


class Replay:
    """Fake CUDA graph that counts the warps of the kernels it captured.

    Like a CUDA graph, it does not keep the memory of ``run`` alive.
    """

    def __init__(self, run: Callable[[Any], object], sets: Sequence[Any]) -> None:
        self.run = weakref.ref(run)
        self.warps = 0
        original = StitchedKernel.launch

        def launch(kernel: StitchedKernel, *arguments: Any) -> None:
            self.warps += sum(launch.num_warps for launch in kernel.program.launches)
            original(kernel, *arguments)

        StitchedKernel.launch = launch  # type: ignore[method-assign]
        try:
            run(sets[0])
        finally:
            StitchedKernel.launch = original  # type: ignore[method-assign]

    def replay(self, runs: int) -> float:
        assert self.run() is not None, "memory of a graph is gone"
        return float(self.warps)


def break_program(key: str) -> None:
    """Patch launches of the program so that one number of its result is too large."""
    original = StitchedKernel.launch

    def launch(kernel: StitchedKernel, inputs: Any, outputs: Any, *rest: Any) -> None:
        original(kernel, inputs, outputs, *rest)
        if kernel.program.key == key:
            outputs[0][-1, -1] += 1

    StitchedKernel.launch = launch  # type: ignore[method-assign]


def main(folder: Path) -> None:
    prepare()
    torch.manual_seed(0)
    CHAINS[CHAIN.name] = CHAIN
    keys = [program.key for program in sample_chain(CHAIN, MAX_PLANS, 0).programs()]
    for at, key in enumerate(keys):
        kernels = {"kernels": [{"registers": 40 + at, "stack_bytes": 0}]}
        result_path(folder, key).write_text(json.dumps({"error": "no"} if at == 4 else kernels))
    break_program(keys[3])
    timing.COLD_BYTES = 1
    timing.capture_graph = Replay  # type: ignore[assignment]
    timing.time_replay = Replay.replay  # type: ignore[assignment]
    timing.ReplayClock = lambda: RecordedClock({})  # type: ignore[assignment,misc]
    evaluate.torch.cuda.is_available = lambda: False
    job = Job(CHAIN.name, TimingSettings(folder, "cpu", 3), MAX_PLANS, 0, monotonic() + 600)
    print(json.dumps(measure(job)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
