"""Measurement of collectives along the dimensions of a mesh, and of the rates of a device.

Calls follow each other without waiting for the device, as in a training step.  Those of a CUDA
graph take no time of the processor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from nostall.parallel.sharding.cost.device_mesh import CollectiveCost
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.placements import COLLECTIVES, Collective
from nostall.parallel.sharding.program.cuda_graph import CudaGraph
from nostall.parallel.sharding.program.devices import Devices
from nostall.parallel.sharding.program.side_stream import SideStream

SIZES = tuple(1 << n for n in (14, 17, 20, 23, 26))
"""Bytes of the largest local tensor."""
CALLS, REPEATS, WARM_UPS = 10, 5, 2
SUSTAINED_S = 1.0
"""Seconds for which a GPU runs products before and while they are timed: its clock falls with its
power, so short runs are faster than a training step."""
_MATMUL = 4096
"""Rows and columns of the matrices whose product is measured."""


def measure_collectives(
    devices: Devices,
    device: torch.device,
    sizes: Sequence[int] = SIZES,
    *,
    in_graph: bool = False,
) -> dict[tuple[Collective, int], CollectiveCost]:
    """The cost of each collective along each mesh dimension; the same on all ranks.

    A collective call: every rank makes it.  The costs are those with the least relative error.
    ``in_graph`` starts the collectives by CUDA graphs; raises :class:`CaptureFailed` if a rank
    cannot capture them.
    """
    seconds = _seconds_in_graph if in_graph else _seconds
    costs = {}
    for mesh_dim, count in enumerate(devices.mesh):
        for kind in COLLECTIVES:
            times = []
            for size in sizes:
                action = _collective(devices, kind, mesh_dim, size, count, device)
                times.append(seconds(action, device))
            slowest = torch.tensor(times, dtype=torch.float64, device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            costs[kind, mesh_dim] = fit_cost(sizes, slowest.tolist())
    return costs


def fit_cost(sizes: Sequence[float], seconds: Sequence[float]) -> CollectiveCost:
    """Latency and seconds per byte with the least sum of squared relative errors."""
    times = np.asarray(seconds)
    rows = np.stack([np.ones(len(times)), np.asarray(sizes, float)], 1) / times[:, None]
    (latency, slope), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    return CollectiveCost(max(0.0, float(latency)), max(0.0, float(slope)))


def _collective(
    devices: Devices, kind: Collective, mesh_dim: int, size: int, count: int, device: torch.device
) -> Callable[[], object]:
    """A call of a collective whose largest local tensor has ``size`` bytes."""
    whole = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    part = whole[: len(whole) // count]
    parts = whole.unflatten(0, (count, -1))
    calls: dict[Collective, Callable[[], object]] = {
        "all-gather": lambda: devices.gather([part], mesh_dim),
        "all-reduce": lambda: devices.add([whole], mesh_dim),
        "reduce-scatter": lambda: devices.add_parts([parts], mesh_dim),
        "all-to-all": lambda: devices.send_parts([parts], mesh_dim),
    }
    return calls[kind]


def measure_rates(name: str, device: torch.device) -> DeviceRates:
    """Sustained FLOP/s of a large matrix product by type, bytes/s of an addition, launch time."""
    flops = {}
    for dtype in (torch.bfloat16, torch.float32):
        extent = _MATMUL if device.type == "cuda" else 256
        a, b = (torch.randn(extent, extent, device=device).to(dtype) for _ in range(2))
        product = partial(torch.matmul, a, b)
        short = _seconds(product, device)
        is_cuda = device.type == "cuda"
        calls = max(CALLS, int(SUSTAINED_S / short / (WARM_UPS + REPEATS))) if is_cuda else CALLS
        seconds = _seconds(product, device, calls)
        flops[str(dtype).removeprefix("torch.")] = 2 * extent**3 / seconds
    large = torch.ones((1 << 27) if device.type == "cuda" else 1 << 20, device=device)
    small = torch.ones(16, device=device)
    memory = 2 * large.numel() * large.itemsize / _seconds(lambda: large + 1.0, device)
    launch_s = _seconds(lambda: small + 1.0, device, calls=200)
    return DeviceRates(name, flops, memory, 0.0, launch_s)


def measure_kernel(device: torch.device) -> float:
    """Seconds of a small operator of a CUDA graph, which any operator takes at least.

    A collective call if there is a process group.
    """
    small = torch.ones(16, device=device)
    return _seconds_in_graph(lambda: small + 1.0, device, calls=200)


def measure_contention(devices: Devices, device: torch.device) -> float:
    """Share of its speed that a matrix product loses while an all-reduce runs; equal on all ranks.

    A collective call: every rank makes it.  Products that last longer than the all-reduces run
    alone, then with these beside them; the seconds they take longer, over those of the all-reduces.
    """
    if device.type != "cuda":
        return 0.0
    side = SideStream(device)
    matrix = torch.randn(_MATMUL, _MATMUL, device=device).to(torch.bfloat16)
    buffer = torch.zeros(SIZES[-1] // 2, dtype=torch.bfloat16, device=device)

    def products() -> None:
        for _ in range(count):
            torch.matmul(matrix, matrix)

    def reductions() -> Callable[[], object]:
        return side.start(lambda: [devices.add([buffer], 0)[0] for _ in range(CALLS)], [buffer])

    def both() -> None:
        wait = reductions()
        products()
        wait()

    count = 1
    alone = _seconds(products, device)
    reduced = _agreed(_seconds(lambda: reductions()(), device), device)
    count = max(1, int(_LONGER * reduced / _agreed(alone, device)))
    _seconds(products, device, max(1, int(SUSTAINED_S / (count * alone))))  # the clock falls
    lost = _agreed(_seconds(both, device), device) - _agreed(_seconds(products, device), device)
    return min(1.0, max(0.0, lost / reduced))


def measure_launches(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds in which the processor launches a step on an idle GPU, and until the GPU is done.

    Medians of the slowest rank.  A collective call: every rank makes it.
    """
    launched, done = [], []
    for _ in range(WARM_UPS + REPEATS):
        _wait(device)
        dist.barrier()
        _wait(device)
        start = perf_counter()
        run()
        launched.append(perf_counter() - start)
        _wait(device)
        done.append(perf_counter() - start)
    medians = (statistics.median(seconds[WARM_UPS:]) for seconds in (launched, done))
    return _agreed(next(medians), device), _agreed(next(medians), device)


_LONGER = 2.5
"""Time of the products over that of the all-reduces beside them."""


def _agreed(seconds: float, device: torch.device) -> float:
    """The largest of the seconds of all ranks."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _seconds(action: Callable[[], object], device: torch.device, calls: int = CALLS) -> float:
    """Median seconds of a call among calls that follow each other."""
    times = []
    for _ in range(WARM_UPS + REPEATS):
        _wait(device)
        start = perf_counter()
        for _ in range(calls):
            action()
        _wait(device)
        times.append((perf_counter() - start) / calls)
    return statistics.median(times[WARM_UPS:])


def _seconds_in_graph(
    action: Callable[[], object], device: torch.device, calls: int = CALLS
) -> float:
    """As :func:`_seconds`, with the calls in a CUDA graph.

    Raises :class:`CaptureFailed`: the time of launched calls is another quantity.
    """

    def several() -> None:
        for _ in range(calls):
            action()

    graph = CudaGraph.capture(several)
    return _seconds(graph, device, calls=1) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
