"""Benchmark of the host time of one call of a stitched kernel.

    python -m benchmarks run fusion.host_cost --out OUT.json [--device cuda]

Microseconds of a call, the least over ``--rounds`` rounds of 2,000 calls, for kernels with
different numbers of tensors and launches:

- ``direct``: the function that Inductor's generated code calls;
- ``operator``: ``torch.ops.nostall.stitched``, which checks its inputs;
- ``triton``: Triton's launch ``kernel[grid](...)`` alone, with allocated outputs (on a GPU only);
- ``memory``: the allocation of outputs alone, a part of the first two.

Without a GPU the launch is a function that does nothing.
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
from nostall.attach.torch_compile.runtime import custom_op, launcher
from nostall.attach.torch_compile.store.records import KernelRecord, LaunchRecord, TensorRecord
from nostall.fusion.codegen.runtime.kernel import load_source

CALLS = 2000
ROWS, COLUMNS = 64, 96
"""Shape of every tensor."""
KERNELS = {"1 in, 1 out": (1, 1, 1), "4 in, 2 out": (4, 2, 1), "8 in, 4 out, 2 launches": (8, 4, 2)}
"""Numbers of inputs, outputs and launches, by their description."""


def make_record(inputs: int, outputs: int, launches: int) -> KernelRecord:
    """Record of a kernel that adds its inputs and writes the sum to every output."""
    tensor = TensorRecord(shape=(ROWS, COLUMNS), strides=(COLUMNS, 1), dtype="float32")
    names = tuple(f"p{index}" for index in range(inputs + outputs))
    launch = LaunchRecord(name="add", arguments=names, counts=(1,), grid=(48, 1), num_warps=4)
    return KernelRecord(
        source="",
        plan="",
        inputs=(tensor,) * inputs,
        outputs=(tensor,) * outputs,
        launches=(launch,) * launches,
        workspaces=(),
    )


def kernel_source(record: KernelRecord) -> str:
    """Triton source of the kernel of a record."""
    names = record.launches[0].arguments
    input_count = len(record.inputs)
    return "\n    ".join(
        [
            "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
            f"def add({', '.join(names)}, count):",
            "at = tl.program_id(0) * 128 + tl.arange(0, 128)",
            "x = " + " + ".join(f"tl.load({name} + at)" for name in names[:input_count]),
            *(f"tl.store({name} + at, x)" for name in names[input_count:]),
        ]
    )


class FakeKernel:
    """Fake of a Triton function and of its binary; a launch does nothing."""

    function, packed_metadata = 0, ()

    def __getitem__(self, grid: Any) -> Callable[..., FakeKernel]:
        return lambda *arguments, **options: self

    @staticmethod
    def run(*arguments: Any) -> None: ...


def measure(name: str, device: torch.device, rounds: int, folder: Path) -> dict[str, Any]:
    """Microseconds of each kind of call for one of :data:`KERNELS`."""
    record = make_record(*KERNELS[name])
    function: Any = FakeKernel()
    if device.type == "cuda":
        function = load_source(kernel_source(record), ["add"], folder)[1][0]
    else:
        # The fake writes no outputs, so that a direct launch could not be compared with Triton's.
        launcher._Check.reproduces = lambda *arguments: True
    functions = [function] * len(record.launches)
    op = custom_op.StitchedOp(record, lambda: functions)
    # Register the kernel without a store.
    custom_op._unchecked_calls[name] = op.unchecked_call
    setattr(custom_op, "load_op", lambda kernel: op)  # noqa: B010
    inputs = [torch.ones(ROWS, COLUMNS, device=device) for _ in record.inputs]
    outputs = op.allocate_outputs(inputs)
    allocate = torch._C._dynamo.guards._empty_strided_cpu
    if device.type == "cuda":
        allocate = torch._C._dynamo.guards._empty_strided_cuda
    calls: dict[str, Callable[[], object]] = {
        "direct": lambda: custom_op.launch(inputs, name),
        "operator": lambda: custom_op.STITCHED_OP(inputs, name),
        "memory": lambda: [allocate(*layout) for layout in op.launcher(None).outputs],
    }
    if device.type == "cuda":
        calls["triton"] = lambda: [
            function[launch.grid](*inputs, *outputs, *launch.counts, num_warps=4)
            for launch in record.launches
        ]
    best_seconds = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for kind, call in calls.items():
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            best_seconds[kind] = min(best_seconds[kind], timeit.timeit(call, number=CALLS) / CALLS)
    return {kind: round(1e6 * seconds, 2) for kind, seconds in best_seconds.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=50)


def main(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    gpu = None
    if device.type == "cuda":
        device, gpu = torch.device("cuda", 0), torch.cuda.get_device_name(0)
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        results = {name: measure(name, device, options.rounds, Path(folder)) for name in KERNELS}
    save(
        options.out,
        kind="measured",
        unit="microseconds",
        gpu=gpu,
        torch=torch.__version__,
        launch="on the GPU" if gpu else "does nothing",
        calls=results,
    )
    for name, microseconds in results.items():
        print(name, microseconds)
