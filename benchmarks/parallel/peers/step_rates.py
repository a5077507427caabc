"""Rates of the parts of a step on GPUs of a host: products, AdamW, collectives beside products.

    python -m benchmarks run parallel.step_rates --gpus 2 --out OUT.json

Products and collectives alone are timed as CUDA graphs of many, AdamW by its fused steps.  A
collective beside products runs on a stream of high priority, as those of plans, while another
stream has products; its wait is the time that it takes more than alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.parallel.peers.run import device_name, environment, free_port

LIMIT_S = 60.0
SHAPES = (
    (4096, 1024, 1024), (4096, 1024, 4096), (4096, 4096, 1024), (4096, 2048, 2048),
    (4096, 8192, 2048), (4096, 2048, 8192), (4096, 4096, 4096), (4096, 14336, 4096),
    (4096, 4096, 14336), (4096, 32000, 2048), (2048, 16384, 8192), (2048, 8192, 16384),
)  # fmt: skip
"""Rows, columns and depth of products in bfloat16, those of half of a batch of the models."""
SIZES = (2**14, 2**18, 2**21, 2**23, 2**25, 2**27)
"""Bytes of the larger tensor of a collective."""
COUNT, REPEATS = 20, 5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="nostall-rates-") as folder:
        out, port = Path(folder) / "rates.json", free_port()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(out)],
                env=environment(
                    False, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.gpus),
                    MASTER_PORT=port,
                ),
            )
            for rank in range(options.gpus)
        ]  # fmt: skip
        try:
            for own in ranks:
                own.wait(LIMIT_S)
        finally:
            for own in ranks:
                own.kill()
        body = json.loads(out.read_text())
    save(options.out, kind="measured", gpus=options.gpus, device=device_name("cuda"), **body)
    print(json.dumps(body, indent=None))


def rank(out: Path) -> None:
    """One rank; rank 0 writes the record after each part."""
    import torch
    import torch.distributed as dist

    number = int(os.environ["RANK"])
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", timeout=timedelta(seconds=50))
    found: dict[str, Any] = {}
    parts = {"adamw": _adamw, "products": _products, "collectives": _collectives}
    for name, part in parts.items():
        if name == "collectives" and dist.get_world_size() == 1:
            continue
        found[name] = part()
        if number == 0:
            out.write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # NCCL does not end a communicator while a graph uses it


def _timed(action: Callable[[], object], count: int = 1) -> float:
    """Median milliseconds of an action, of which there are ``count``."""
    import torch

    samples = []
    for _ in range(REPEATS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / count)
    return statistics.median(samples[1:])


def _graph(action: Callable[[], object]) -> Callable[[], object]:
    """The graph of :data:`COUNT` times an action."""
    import torch

    from nostall.parallel.sharding.program.cuda_graph import CudaGraph

    def several() -> None:
        for _ in range(COUNT):
            action()

    return CudaGraph.capture(several, stream=torch.cuda.Stream())


def _adamw() -> list[dict[str, Any]]:
    """Fused steps in bfloat16, on few large and many small tensors."""
    import torch

    rows = []
    for tensors, numel in ((4, 2**27), (40, 2**22), (100, 2**20), (200, 2**12)):
        own = [torch.nn.Parameter(torch.randn(numel, device="cuda", dtype=torch.bfloat16))
               for _ in range(tensors)]  # fmt: skip
        for parameter in own:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(own, fused=True)

        def steps(optimizer: Any = optimizer) -> None:
            for _ in range(COUNT):
                optimizer.step()

        ms = _timed(steps, COUNT)
        moved = 7 * 2 * tensors * numel  # reads 4 of 4 tensors and writes 3 of them
        rows.append({"tensors": tensors, "numel": numel, "ms": ms, "bytes_per_s": 1e3 * moved / ms})
        del own, optimizer
        torch.cuda.empty_cache()
    return rows


def _products() -> list[dict[str, Any]]:
    import torch

    rows = []
    for m, n, k in SHAPES:
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        ms = _timed(_graph(lambda a=a, b=b: a @ b.t()), COUNT)
        rows.append({"shape": [m, n, k], "ms": ms, "flops_per_s": 2e3 * m * n * k / ms})
    return rows


def _collectives() -> list[dict[str, Any]]:
    """Milliseconds alone, beside products of three sizes, and of these products."""
    import torch
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    ranks = dist.get_world_size()
    group = dist.new_group(list(range(ranks)), pg_options=options)
    side, rows = torch.cuda.Stream(priority=-1), []
    for size in SIZES:
        whole = torch.zeros(size // 2, device="cuda", dtype=torch.bfloat16)
        part = torch.zeros(size // 2 // ranks, device="cuda", dtype=torch.bfloat16)
        calls: dict[str, Callable[[], object]] = {
            "all-reduce": lambda w=whole: dist.all_reduce(w, group=group),
            "all-gather": lambda w=whole, p=part: dist.all_gather_into_tensor(w, p, group=group),
            "reduce-scatter": lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w, group=group),
        }
        for kind, call in calls.items():
            row: dict[str, Any] = {"kind": kind, "bytes": size, "ms": _timed(_graph(call), COUNT)}
            for width in (1024, 2048, 4096) if size <= 2**23 else (4096,):
                row[f"beside_{width}"] = _beside(call, width, row["ms"], side)
            rows.append(row)
    return rows


def _beside(call: Callable[[], object], width: int, ms: float, side: Any) -> dict[str, Any]:
    """A collective beside products of 4096 rows, of ``width`` columns and depth.

    A graph has products in a row, and collectives on a side stream that end before them.
    """
    import torch

    from nostall.parallel.sharding.program.cuda_graph import CudaGraph

    a = torch.randn(4096, width, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(width, width, device="cuda", dtype=torch.bfloat16)
    alone = _timed(_graph(lambda: a @ b), COUNT)
    count = 10
    products = int(count * (3 * ms + 0.15) / alone) + 10
    begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

    def both() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            begin.record()
            for _ in range(count):
                call()
            end.record()
        for _ in range(products):
            a @ b
        main.wait_stream(side)

    graph = CudaGraph.capture(both, stream=torch.cuda.Stream())
    whole = _timed(graph)
    try:
        inside = begin.elapsed_time(end) / count
    except RuntimeError as error:  # without events in graphs
        return {"error": str(error).split("\n")[0]}
    graph.close()
    return {
        "ms": inside, "wait_ms": inside - ms,
        "lost_share": (whole - products * alone) / max(1e-6, count * inside),
    }  # fmt: skip


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
