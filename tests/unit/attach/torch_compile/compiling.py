"""Programs by ``torch.compile(backend="nostall")`` in Triton's interpreter, one process after the
other: ``python -m tests.unit.attach.torch_compile.compiling FOLDER`` writes what each found as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from nostall.attach.torch_compile.backend import Backend
from nostall.attach.torch_compile.measure import plan_tuning as plans
from nostall.attach.torch_compile.rewrite import matching
from nostall.attach.torch_compile.rewrite.direct_call import FUNCTION
from nostall.attach.torch_compile.runtime.custom_op import STITCHED as OPERATOR
from nostall.attach.torch_compile.runtime.custom_op import observed
from nostall.attach.torch_compile.selection import precompile
from nostall.attach.torch_compile.store.records import Kept
from nostall.attach.torch_compile.workers.codegen_job import Written
from nostall.attach.torch_compile.workers.worker import HELPER, HELPERS, WRITER, Answer
from nostall.core.measurement import Kind
from nostall.fusion.testing.triton_interpreter import prepare
from nostall.gpu.clock import RecordedClock, Run, Samples

FASTER = RecordedClock({"*": [[2.0] * 12, [1.0] * 12, [2.0] * 12]})


class SecondWins:
    """Of several plans the second is the fastest."""

    name = "recorded"
    kind: Kind = "measured"
    asked = 0

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        self.asked += 1
        return [[1.0 if at == 1 else 2.0] * 12 for at in range(len(runs))]


class Loses(SecondWins):
    """What is timed at these turns takes ``lost`` times as long; everything runs."""

    def __init__(self, *turns: int, lost: float = 1.0) -> None:
        self.turns, self.lost = turns, lost

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        for run in runs:
            run()
        found = super().samples(graph, runs, seconds)
        slower = [[1.0] * 12, [self.lost] * 12, [1.0] * 12]
        return slower if self.asked in self.turns else found


STITCHED = {"nostall.choose": "stitched"}
OP = f"torch.ops.{OPERATOR}"
EAGER = {"nostall.rest": "eager"}
MOST_CALLS = 6000
ALL_DUELS = {"nostall.race": 0, "nostall.seconds": 60.0}


class Feed(nn.Module):
    """Norm, matrix product, residual, softmax; nothing is left for a C++ compiler."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.up(self.norm(x))).softmax(-1)


class Norms(nn.Module):
    """A batch norm changes its buffers in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch(x).softmax(-1)


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    module = {"wide": lambda: Feed(24), "narrow": lambda: Feed(12), "norms": lambda: Norms(12)}
    given = torch.randn(6, 24 if name == "wide" else 12)
    found = module[name]()
    return found.requires_grad_(name != "narrow"), given.requires_grad_(name != "narrow")


def results(function: Callable[..., Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, its gradients, and what the module remembers."""
    torch.manual_seed(1)
    module.zero_grad()
    x.grad = None
    y = function(x)
    if not x.requires_grad:
        return [y.detach()]
    (y * torch.linspace(0, 1, y.numel()).view(y.shape)).sum().backward()
    gradients = [p.grad.clone() for p in (x, *module.parameters()) if p.grad is not None]
    return [y.detach(), *gradients, *(b.clone() for b in module.buffers())]


def apart(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def digest(values: list[Tensor]) -> str:
    data = b"".join(value.contiguous().numpy().tobytes() for value in values)
    return hashlib.sha256(data).hexdigest()


def cached(name: str) -> dict[str, Any]:
    """A stitched model whose rest is Inductor's, by the entry point."""
    from torch._dynamo.utils import counters

    before = dict(counters["aot_autograd"])
    module, x = made(name)
    with observed() as called:
        # Inductor's own patterns take seconds to load.
        options = {**STITCHED, "pattern_matcher": False}
        function = torch.compile(module, backend="nostall", options=options)
        found, written = run_and_get_code(lambda: results(function, module, x))
    plain, y = made(name)
    hits = "autograd_cache_hit"
    return {
        "kernels": sorted(called),
        "calls": [sum(code.count(f" = {name}(") for code in written) for name in (FUNCTION, OP)],
        "digest": digest(found),
        "apart": apart(found, results(plain, plain, y)),
        "hits": counters["aot_autograd"][hits] - before.get(hits, 0),
    }


def trained(model: str, race: SecondWins, options: dict[str, Any]) -> dict[str, Any]:
    """A training loop in which the stitched version wins, if it comes to a comparison."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # or what another loop compiled counts
    hits = counters["inductor"]["fxgraph_cache_hit"]
    whole = counters["aot_autograd"]["autograd_cache_hit"]
    backend = Backend(FASTER, race)
    module, x = made(model)
    function = torch.compile(module, backend=backend, options={**EAGER, **options})
    found, states, called, after = [], [], [], 0
    started: list[bool] = []
    while after < 2 and len(states) < MOST_CALLS:
        with observed() as names:
            found.append(results(function, module, x))
        started.append(HELPER.running and WRITER.running)
        (report,) = backend.reports
        states.append(report.state)
        called.append(len(names) > 0)
        after += bool(report.reason)
        time.sleep(0.01)  # for what is stitched in the background
    plain, y = made(model)
    wanted = [results(plain, plain, y) for _ in found]
    return {
        "states": states,
        "called": called,
        "started": started,
        "apart": max(apart(a, b) for a, b in zip(found, wanted, strict=True)),
        "from store": report.from_store,
        "reason": report.reason,
        "ratio": report.compared.ratio if report.compared else None,
        "seconds": sorted(report.seconds),
        "asked": race.asked,
        "plans": sorted(Kept().kernel(name)[0].plan for name in names),
        "kernels": sorted(names),
        "left": report.left,
        "not ahead": report.not_ahead,
        "explained": report.explain(),
        "digest": digest(found[-1]),
        "hits": counters["inductor"]["fxgraph_cache_hit"] - hits,
        "whole hits": counters["aot_autograd"]["autograd_cache_hit"] - whole,
    }


def helped() -> dict[str, Any]:
    """A program for which other processes work, and one for which none can, as if on different
    machines, and both once more; what was written for it, and whether those processes are gone."""
    options = {**ALL_DUELS, "nostall.rest": "inductor", "pattern_matcher": False}
    places = [os.environ["NOSTALL_HOME"], os.environ["TORCHINDUCTOR_CACHE_DIR"]]
    written, result = WRITER.do, dict[str, Any]()
    target, many = precompile.target_of, (precompile.REGIONS, precompile.COMPILERS)
    precompile.target_of = lambda device: "nothing is compiled in an interpreter"
    precompile.REGIONS, precompile.COMPILERS = 1, 8
    errands: list[str] = []
    answered = {"first": list[str](), "others": list[str]()}
    first, *others = (process.do for process in HELPERS)

    def asks(name: str, do: Callable[[Any], Any], errand: Any) -> Any:
        answer = do(errand)
        answered[name].append(answer.failure)
        return answer

    def writes(errand: Any) -> Any:
        answer = written(errand)
        errands.append(f"{type(errand).__name__}: {answer.failure}")
        return answer

    def fails(errand: Any) -> Any:
        return Answer("no luck")

    def dies(errand: Any) -> Any:
        return Answer(done=Written(died=True))

    WRITER.do = dies  # type: ignore[method-assign]
    for process, do in zip(HELPERS[1:], others, strict=True):
        process.do = partial(asks, "others", do)  # type: ignore[method-assign]
    result["died"] = trained("wide", Loses(), options)
    for name, do, write in (
        ("helped", partial(asks, "first", first), writes),
        ("alone", fails, fails),
    ):
        HELPER.do, WRITER.do = do, write  # type: ignore[method-assign]
        os.environ["NOSTALL_HOME"], os.environ["TORCHINDUCTOR_CACHE_DIR"] = (
            f"{place}-{name}" for place in places
        )
        for run in (name, f"{name}, again"):
            result[run] = trained("wide", Loses(), options)
        precompile.REGIONS, precompile.COMPILERS = many[0], 1
    WRITER.do = written  # type: ignore[method-assign]
    for process, do in zip(HELPERS, (first, *others), strict=True):
        process.do = do  # type: ignore[method-assign]
    precompile.target_of, (precompile.REGIONS, precompile.COMPILERS) = target, many
    os.environ["NOSTALL_HOME"], os.environ["TORCHINDUCTOR_CACHE_DIR"] = places
    running = any(process.running for process in (*HELPERS, WRITER))
    return {**result, "running": running, "errands": errands, "answered": answered}


def duelled() -> dict[str, Any]:
    """Programs of whose kernels all or all but one are faster than Inductor's, or all are equal, or
    slower, one after the other, as if on different machines; and once more."""
    result = {}
    home = os.environ["NOSTALL_HOME"]
    clocks = {
        "all": Loses(),
        "some": Loses(2),
        "equal": Loses(*range(99)),
        "none": Loses(*range(99), lost=2.0),
    }
    for name, clock in clocks.items():
        os.environ["NOSTALL_HOME"] = f"{home}-{name}"
        for run in ("first", "again"):
            result[f"{name}, {run}"] = trained("wide", clock, ALL_DUELS)
    os.environ["NOSTALL_HOME"] = home
    return result


def measured() -> dict[str, Any]:
    """A program in which the stitched version wins, and the next one, which knows that."""
    race = SecondWins()
    least, plans.LEAST_S = plans.LEAST_S, 0.0  # an interpreter's sizes are small
    result: dict[str, Any] = {run: trained("norms", race, {}) for run in ("first", "again")}
    plans.LEAST_S = least
    records = [json.loads(x.read_text()) for x in (Kept().folder / "races").glob("*.json")]
    result["won"] = [record["plans"][record["winner"]] for record in records]
    result["winners"] = [record["winner"] for record in records]
    home = os.environ["NOSTALL_HOME"]
    os.environ["NOSTALL_HOME"] = f"{home}-short"
    result["short"] = trained("norms", SecondWins(), {})
    result["short races"] = len([*(Kept().folder / "races").glob("*.json")])
    os.environ["NOSTALL_HOME"] = home
    return result


def strange() -> dict[str, Any]:
    """Programs of which little or nothing can be stitched: largest difference, kernels, reasons."""

    def breaks(x: Tensor) -> Tensor:
        y = x.softmax(-1)
        torch._dynamo.graph_break()
        return (y - y.mean(-1, keepdim=True)).exp()

    def in_place(x: Tensor) -> Tensor:
        y = x.softmax(-1)
        z = y[0]
        z.add_(1)
        return y.sum(-1) + x.add_(z).sum(-1)

    def numbers(x: Tensor) -> Tensor:
        return torch.view_as_complex(x.view(-1, 2)).abs() + x.view(-1, 2).softmax(-1).sum(-1)

    def chosen(x: Tensor) -> Tensor:
        return x[x > 0].sort().values.cumsum(0)

    def normed(x: Tensor) -> Tensor:
        mean, variance = torch.zeros(12), torch.ones(12)
        return torch.nn.functional.batch_norm(x, mean, variance).softmax(-1)

    result = {}
    for function in (breaks, in_place, numbers, chosen, normed):
        backend = Backend()
        compiled = torch.compile(function, backend=backend, options={**EAGER, **STITCHED})
        torch.manual_seed(0)
        x = torch.randn(6, 12)
        with (
            torch.inference_mode() if function is breaks else torch.no_grad(),
            observed() as called,
        ):
            found, wanted = compiled(x.clone()), function(x.clone())
        result[function.__name__] = {
            "apart": float((found - wanted).abs().max()),
            "strides": [found.stride(), wanted.stride()],
            "kernels": len(called),
            "refused": sorted({why for r in backend.reports for why, _ in r.refused}),
            "graphs": len(backend.reports),
        }
    return result


def dynamic() -> dict[str, Any]:
    """A program with a batch that varies, beside eager PyTorch (with gradients, by comparison,
    stitched at the second call or in the background, and again by what was chosen; at 17 kernels
    could not count the elements) and in Inductor's code, and one with two such sizes."""
    from torch._dynamo.utils import counters

    at_once = {**EAGER, "nostall.background": False}
    ways = {
        "eager": ("wide", at_once, (6, 7, 16, 6, 17)),
        "again": ("wide", at_once, (6, 7, 16, 17)),
        "background": ("wide", {**EAGER, "nostall.extent": "all"}, (6, *[7, 8] * 300, 16, 17)),
        # Without gradients nothing is left for a C++ compiler.
        "inductor": ("narrow", {**STITCHED, "pattern_matcher": False}, (6, 7, 16, 6)),
    }
    result: dict[str, Any] = {}
    matching.MAX_ELEMENTS = 16 * 24
    for name, (model, options, sizes) in ways.items():
        torch._dynamo.reset()
        backend = Backend(FASTER)
        module, x = made(model)
        compiled = torch.compile(module, backend=backend, options=options)
        before = counters["stats"]["unique_graphs"]
        gaps, states, called = [], [], []
        for rows in sizes:
            if name == "background" and rows < 16 and "stitched" in states:
                continue
            time.sleep(0.01 if name == "background" else 0.0)
            given = torch.randn(rows, x.shape[1]).requires_grad_(x.requires_grad)
            torch._dynamo.mark_dynamic(given, 0)
            with observed() as names:
                found = results(compiled, module, given)
            gaps.append(apart(found, results(module, module, given)))
            states.append(backend.reports[-1].state)
            called.append(len(names))
        result[name] = {
            "apart": max(gaps),
            "compiled": counters["stats"]["unique_graphs"] - before,
            "states": states,
            "called": called,
        }
    backend = Backend()
    compiled = torch.compile(
        lambda x: x.softmax(-1), backend=backend, dynamic=True, options={**EAGER, **STITCHED}
    )
    gaps = [
        float((compiled(x) - x.softmax(-1)).abs().max()) for x in map(torch.ones, ((3, 4), (5, 6)))
    ]
    refused = [list(r.refused) for r in backend.reports]
    return {**result, "two": {"apart": max(gaps), "refused": refused}}


def saved_for_backward(backend: str, options: dict[str, Any] | None) -> list[str]:
    """What a compiled forward pass keeps for the backward pass."""
    torch._dynamo.reset()
    module, x = made("wide")
    kept: list[str] = []

    def pack(value: Tensor) -> Tensor:
        kept.append(f"{tuple(value.shape)} {value.stride()} {value.dtype}")
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        torch.compile(module, backend=backend, options=options)(x)
    return sorted(kept)


def everything(models: tuple[str, ...]) -> dict[str, Any]:
    return {
        "cached": {name: cached(name) for name in models},
        "measured": measured(),
        "partial": duelled(),
        "ahead": helped(),
        "strange": strange(),
        "dynamic": dynamic(),
        "saved": {
            "stitched": saved_for_backward("nostall", {**STITCHED, **EAGER}),
            "plain": saved_for_backward("aot_eager_decomp_partition", None),
        },
    }


def only_cached(models: tuple[str, ...]) -> dict[str, Any]:
    return {"cached": {name: cached(name) for name in models}}


def elsewhere(models: tuple[str, ...]) -> dict[str, Any]:
    """On a machine whose caches know nothing of what was compiled on the first one."""
    place = Path(sys.argv[1]) / "elsewhere"
    os.environ["NOSTALL_HOME"] = str(place / "home")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place / "inductor")
    return only_cached(models)


def ranks(models: tuple[str, ...]) -> dict[str, Any]:
    """Two processes of one job at the same time, on machines with stores of their own.  Where rank
    0 races the second plan wins; rank 1 takes no time at all."""
    place = Path(sys.argv[1]) / "job"
    place.mkdir()
    plans.LEAST_S = 0.0

    def run(rank: int) -> dict[str, Any]:
        os.environ["NOSTALL_HOME"] = str(place / f"home {rank}")
        meeting = f"file://{place / 'meeting'}"
        torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=2)
        found = {"alone": trained(models[0], SecondWins(), {}), "ddp": in_buckets(rank)}
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        return found

    children = [forked(partial(run, rank), place / f"{rank}.json") for rank in range(2)]
    for child in children:
        ended(child)
    return {f"rank {rank}": json.loads((place / f"{rank}.json").read_text()) for rank in range(2)}


def in_buckets(rank: int) -> dict[str, Any]:
    """A model by DistributedDataParallel, whose graphs PyTorch splits, beside eager PyTorch, on
    both ranks until all graphs have chosen on both."""
    from torch.nn.parallel import DistributedDataParallel

    distributed: Any = torch.distributed
    distributed._DEFAULT_FIRST_BUCKET_BYTES = 1500
    torch._dynamo.reset()
    backend, programs = Backend(FASTER, SecondWins()), []
    for _ in range(2):
        torch.manual_seed(0)
        module = DistributedDataParallel(nn.Sequential(Feed(24), Feed(24)), bucket_cap_mb=0.002)
        programs.append((module, torch.optim.SGD(module.parameters(), 0.1)))
    options = {**EAGER, "nostall.race": 0}
    compiled = torch.compile(programs[0][0], backend=backend, options=options)
    left, results = torch.ones(1), list[Tensor]()
    while left and len(results) < MOST_CALLS:
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(len(results) + rank))
        with observed() as names:
            for function, optimizer in (compiled, programs[0][1]), programs[1]:
                optimizer.zero_grad()
                y = function(x)
                (y * torch.linspace(0, 1, 24)).sum().backward()
                optimizer.step()
                results.append(y.detach())
        left = torch.tensor(float(not all(report.reason for report in backend.reports)))
        torch.distributed.all_reduce(left)
        time.sleep(0.01)  # for what is stitched in the background
    parameters = zip(*(list(module.parameters()) for module, _ in programs), strict=True)
    return {
        "graphs": [[report.state, report.reason] for report in backend.reports],
        "kernels": sorted(names),
        "apart": max(apart(results[::2], results[1::2]), *(apart([a], [b]) for a, b in parameters)),
    }


# Forked before anything is traced: no process knows what another one did, and PyTorch is imported
# once.
PROCESSES: dict[str, Callable[[], dict[str, Any]]] = {
    "cold": lambda: everything(("wide", "narrow")),
    "warm": lambda: only_cached(("narrow", "wide")),
    "cold elsewhere": lambda: elsewhere(("narrow", "wide")),
    "warm elsewhere": lambda: elsewhere(("wide", "narrow")),
    "ranks": lambda: ranks(("wide",)),
}


def forked(work: Callable[[], dict[str, Any]], place: Path) -> int:
    """A process that writes there what it found; its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        place.write_text(json.dumps(work()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(child: int) -> None:
    """Wait for a process."""
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit("a process failed")


def main() -> None:
    prepare()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name, work in PROCESSES.items():
        ended(forked(work, folder / f"{name}.json"))


if __name__ == "__main__":
    main()
