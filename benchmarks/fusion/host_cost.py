"""What one call of a stitched kernel costs on the host.

    python -m benchmarks run fusion.host_cost --out OUT.json [--device cuda]

Microseconds of a call, the least over ``--rounds`` rounds of 2,000 calls, for kernels of different
numbers of tensors and launches:

- ``direct``: what Inductor's code calls; ``operator``: ``torch.ops.nostall.stitched``, with checks;
- ``triton``: the launch by Triton's ``kernel[grid](...)`` alone, on tensors that are there (on a
  GPU only);
- ``memory``: the allocations of results and workspaces alone, a part of the first two.

Without a GPU the launch itself is a function that does nothing.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.result_file import save
from nostall.attach.torch_compile.runtime import custom_op
from nostall.attach.torch_compile.store.records import KernelRecord, LaunchRecord, TensorRecord
from nostall.fusion.codegen.runtime.kernel import load_source

CALLS = 2000
ROWS, COLUMNS = 64, 96
SHAPES = {"1 in, 1 out": (1, 1, 1), "4 in, 2 out": (4, 2, 1), "8 in, 4 out, 2 launches": (8, 4, 2)}


def record(inputs: int, outputs: int, launches: int) -> KernelRecord:
    """A kernel that adds its inputs and writes the sum to every output."""
    one = TensorRecord(shape=(ROWS, COLUMNS), strides=(COLUMNS, 1), dtype="float32")
    names = tuple(f"p{at}" for at in range(inputs + outputs))
    launch = LaunchRecord(name="add", arguments=names, counts=(1,), grid=(48, 1), num_warps=4)
    return KernelRecord(
        source="",
        plan="",
        inputs=(one,) * inputs,
        outputs=(one,) * outputs,
        launches=(launch,) * launches,
        workspaces=(),
    )


def source(of: KernelRecord) -> str:
    names = of.launches[0].arguments
    given = len(of.inputs)
    return "\n    ".join(
        [
            "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
            f"def add({', '.join(names)}, count):",
            "at = tl.program_id(0) * 128 + tl.arange(0, 128)",
            "x = " + " + ".join(f"tl.load({name} + at)" for name in names[:given]),
            *(f"tl.store({name} + at, x)" for name in names[given:]),
        ]
    )


class Nothing:
    """In place of a kernel and of what Triton makes of it."""

    function, packed_metadata = 0, ()

    def __getitem__(self, grid: Any) -> Callable[..., Nothing]:
        return lambda *arguments, **options: self

    @staticmethod
    def run(*arguments: Any) -> None: ...


def measured(name: str, device: torch.device, rounds: int, folder: Path) -> dict[str, Any]:
    of = record(*SHAPES[name])
    function: Any = Nothing()
    if device.type == "cuda":
        function = load_source(source(of), ["add"], folder)[1][0]
    runner = custom_op.StitchedOp(of, [function] * len(of.launches))
    # In place of a store in which the kernel is kept.
    custom_op._unchecked_calls[name] = runner.unchecked_call
    setattr(custom_op, "load_op", lambda kernel: runner)  # noqa: B010
    given = [torch.ones(ROWS, COLUMNS, device=device) for _ in of.inputs]
    made = runner.allocate_outputs(given)
    empty = torch._C._dynamo.guards._empty_strided_cpu
    if device.type == "cuda":
        empty = torch._C._dynamo.guards._empty_strided_cuda
    ways: dict[str, Callable[[], object]] = {
        "direct": lambda: custom_op.launch(given, name),
        "operator": lambda: custom_op.STITCHED_OP(given, name),
        "memory": lambda: [empty(*one) for one in runner.launcher(None).outputs],
    }
    if device.type == "cuda":
        ways["triton"] = lambda: [
            function[launch.grid](*given, *made, *launch.counts, num_warps=4)
            for launch in of.launches
        ]
    best = dict.fromkeys(ways, math.inf)
    for _ in range(rounds):
        for way, call in ways.items():
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            best[way] = min(best[way], timeit.timeit(call, number=CALLS) / CALLS)
    return {way: round(1e6 * seconds, 2) for way, seconds in best.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=50)


def main(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    gpu = None
    if device.type == "cuda":
        device, gpu = torch.device("cuda", 0), torch.cuda.get_device_name(0)
    with tempfile.TemporaryDirectory(prefix="nostall-") as place:
        found = {n: measured(n, device, options.rounds, Path(place)) for n in SHAPES}
    save(
        options.out,
        kind="measured",
        unit="microseconds",
        gpu=gpu,
        torch=torch.__version__,
        launch="on the GPU" if gpu else "does nothing",
        calls=found,
    )
    for name, ways in found.items():
        print(name, ways)
