"""Stitched chains beside eager and torch.compile on a GPU, under CUDA graphs.

    python -m benchmarks.fusion_chains OUT [--chains PART] [--rounds 40] [--race 4]

For every chain of ``benchmarks.fusion_chain_programs`` a fresh process builds eager, torch.compile,
its mode max-autotune-no-cudagraphs and the stitched version.  The latter's plans come from a short
race: for the explorer's partition and the greedy one, the modelled best plans of every kernel are
timed (``--race 0``: the modelled first choice runs), and the faster partition is taken.  Each
method is captured as a CUDA graph that walks over copies of its inputs larger than L2; replays are
interleaved round by round, eager runs twice (the null).  Times are microseconds for one run.  OUT
is a folder with one JSON for each chain; chains that are there already are left out, so an
interrupted run goes on.  ``--list`` shows the chains and plans without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from benchmarks.fusion_chain_programs import CHAINS, Chain
from benchmarks.provenance import save
from nostall.core.errors import BadInput
from nostall.core.measurement import Comparison
from nostall.fusion.capture import capture, inference_graph
from nostall.fusion.codegen.choice import first_choice
from nostall.fusion.codegen.racing import Racer
from nostall.fusion.codegen.region import StitchedGraph, cover, scheduled, stitch
from nostall.fusion.fuse import explored
from nostall.fusion.graph import Graph
from nostall.gpu.clock import ReplayClock

COLD_BYTES = 256 << 20
"""Bytes that one CUDA graph walks over: an H200 has 50 MB of L2."""
MOST_COPIES = 32
TOLERANCE = {torch.float16: 2e-2, torch.float32: 1e-3, torch.int8: 1}
Run = Callable[[Sequence[Tensor]], object]


class _Module(nn.Module):
    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, *inputs: Tensor) -> Any:
        return self.chain.function(*inputs)


def graph_of(chain: Chain) -> Graph:
    """The chain's operators; raises :class:`BadInput` where some of them are not captured."""
    with FakeTensorMode():
        inputs = chain.tensors("cpu")
    captured = capture(inference_graph(_Module(chain), *inputs))
    if captured.explanation.refused:
        raise BadInput(f"{chain.name}: {captured.explanation}; write the chain without these")
    return captured.graph


def partitions(graph: Graph) -> dict[str, list[tuple[int, ...]]]:
    """The explorer's and the greedy one; one of them where they are equal."""
    found = {"explorer": explored(graph), "greedy": cover(graph)}
    if sorted(found["explorer"]) == sorted(found["greedy"]):
        del found["greedy"]
    return found


def copies(chain: Chain) -> int:
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in chain.inputs)
    return max(1, min(MOST_COPIES, -(-COLD_BYTES // size)))


# -- timing ----------------------------------------------------------------------------------------


def captured_graph(run: Run, sets: Sequence[Sequence[Tensor]]) -> torch.cuda.CUDAGraph:
    """One CUDA graph that runs over all sets of inputs; outputs live in its own pool."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(sets[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in sets:
            run(inputs)
    return graph


def replayed(graph: torch.cuda.CUDAGraph, runs: int) -> float:
    """Microseconds for one run of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / runs


# -- one chain -------------------------------------------------------------------------------------


def stitched(chain: Chain, most: int, folder: Path) -> tuple[StitchedGraph, dict[str, Any]]:
    """The chain as kernels, of the faster partition, and how they were chosen."""
    graph = graph_of(chain)
    found: list[tuple[float, StitchedGraph, str]] = []
    races: dict[str, Any] = {}
    inputs = chain.tensors("cuda")
    for name, groups in partitions(graph).items():
        racer = Racer(ReplayClock(), most, folder=folder)
        whole = stitch(graph, groups, choice=racer if most else first_choice, folder=folder)
        timed = captured_graph(lambda given, w=whole: w(*given), [inputs] * 4)
        seconds = statistics.median(replayed(timed, 4) for _ in range(15))
        found.append((seconds, whole, name))
        told = [record.model_dump(exclude={"schema_version"}) for record in racer.told]
        races[name] = {"us": seconds, "kernels": told, "refused": dict(whole.refused)}
    _, best, name = min(found, key=lambda entry: entry[0])
    plans_taken = [str(s.program.plan) for s in best.steps if not isinstance(s, int)]
    return best, {"partition": name, "plans": plans_taken, "race": races}


def difference(chain: Chain, run: Run, inputs: Sequence[Tensor]) -> list[float]:
    """Largest errors against eager in fp32, relative to the largest value."""
    wide = [x.float() if x.is_floating_point() else x for x in inputs]
    want, got = chain.function(*wide), run(inputs)
    wants, gots = (x if isinstance(x, (tuple, list)) else (x,) for x in (want, got))
    return [
        float((a.float() - b.float()).abs().max() / a.float().abs().max().clamp_min(1e-6))
        for a, b in zip(wants, gots, strict=True)
    ]


def measured(chain: Chain, rounds: int, most: int) -> dict[str, Any]:
    """All methods of one chain, side by side; needs a GPU."""
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder, torch.no_grad():
        best, how = stitched(chain, most, Path(folder))
        compiled = torch.compile(chain.function, dynamic=False)
        tuned = torch.compile(chain.function, dynamic=False, mode="max-autotune-no-cudagraphs")
        runs: dict[str, Run] = {
            "eager": lambda given: chain.function(*given),
            "eager again": lambda given: chain.function(*given),
            "compile": lambda given: compiled(*given),
            "max-autotune": lambda given: tuned(*given),
            "stitched": lambda given: best(*given),
        }
        sets = [chain.tensors("cuda") for _ in range(copies(chain))]
        errors = {name: difference(chain, run, sets[0]) for name, run in runs.items()}
        graphs = {name: captured_graph(run, sets) for name, run in runs.items()}
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for round_ in range(rounds + 3):
            # Another method is first each time.
            names = list(runs)[round_ % len(runs) :] + list(runs)[: round_ % len(runs)]
            for name in names:
                time = replayed(graphs[name], len(sets))
                if round_ >= 3:
                    samples[name].append(round(time, 4))
    return {
        "chain": chain.name,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copies": len(sets),
        "bytes_least": least_bytes(chain),
        "stitched": how,
        "largest_errors": errors,
        "samples_us": samples,
        "compared": compared(samples),
    }


def least_bytes(chain: Chain) -> int:
    """Bytes that have to be read and written once: inputs and outputs."""
    graph = graph_of(chain)
    return sum(graph[i].bytes for i in {*graph.inputs, *graph.outputs})


def compared(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Stitched against each other method; the null is eager beside itself."""
    found = {}
    for name in ("eager", "compile", "max-autotune"):
        # The null is a pair of one method; its spread is carried over to the other ratios.
        scale = [b / a for a, b in zip(samples["eager"], samples["eager again"], strict=True)]
        null = [x * s for x, s in zip(samples[name], scale, strict=True)]
        result = Comparison.of(samples[name], samples["stitched"], null, kind="measured")
        found[name] = {
            "ratio": round(result.ratio, 4),
            "low": round(result.low, 4),
            "high": round(result.high, 4),
            "verdict": result.verdict,
        }
    return found


# -- all chains ------------------------------------------------------------------------------------


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{''.join(c if c.isalnum() else '_' for c in name)}.json"


def listed(names: Sequence[str]) -> None:
    """Chains with the kernels of both partitions and the plans that the model prefers."""
    for name in names:
        graph = graph_of(CHAINS[name])
        print(f"{name}: at least {least_bytes(CHAINS[name]) / 1e6:.1f} MB")
        for kind, groups in partitions(graph).items():
            for group in groups:
                try:
                    print(f"  {kind}: {first_choice(scheduled(graph, group))} (modelled choice)")
                except BadInput as error:
                    print(f"  {kind}: no kernel, will be cut: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--chains", default="", help="only those whose name has this part")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--race", type=int, default=4, help="modelled best plans; 0: no race")
    parser.add_argument("--seconds", type=float, default=240, help="for one chain")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--one", action="store_true", help="in this process (used by itself)")
    options = parser.parse_args()
    names = [name for name in CHAINS if options.chains in name]
    if options.list or options.out is None:
        listed(names)
        return
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here; run this on one, or give --list")
    for name in names:
        path = file_of(options.out, name)
        if path.exists():
            continue
        if options.one:
            save(path, **measured(CHAINS[name], options.rounds, options.race))
            continue
        # A fault ends the process of its chain only.
        command = [sys.executable, "-m", "benchmarks.fusion_chains", str(options.out), "--one"]
        command += ["--chains", name, "--rounds", str(options.rounds), "--race", str(options.race)]
        try:
            done = subprocess.run(command, timeout=options.seconds, check=False)
            failed = f"exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failed = f"more than {options.seconds} s"
        if failed:
            print(f"{name}: {failed}", flush=True)
        elif path.exists():
            print(f"{name}: {json.loads(path.read_text())['compared']}", flush=True)


if __name__ == "__main__":
    main()
