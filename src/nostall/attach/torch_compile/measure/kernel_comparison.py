"""Which kernels of a graph are worth being put in: each beside what Inductor makes of the same
operators, before the graph is compiled with those that were faster.

What a kernel is worth in the whole graph the comparison of the whole graph says; this one finds out
which kernels spoil it.  It runs on the program's own thread, after the race of plans.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor
from torch.fx import GraphModule

from nostall.attach.torch_compile.graph_copies import as_traced
from nostall.attach.torch_compile.graph_key import graph_key
from nostall.attach.torch_compile.measure.baselines import Rival, copied, rivals
from nostall.attach.torch_compile.options import Settings
from nostall.attach.torch_compile.rewrite.compilers import Host, InductorHost
from nostall.attach.torch_compile.rewrite.kernel_selection import Selection, Stitching
from nostall.attach.torch_compile.rewrite.matching import parts_of
from nostall.attach.torch_compile.runtime.custom_op import resolve
from nostall.attach.torch_compile.store.records import DuelRecord, Kept
from nostall.attach.torch_compile.workers.compile_job import Errand
from nostall.attach.torch_compile.workers.torch_state import Surroundings
from nostall.attach.warning import say_once
from nostall.fusion.codegen.autotune.autotuner import fill_tensor
from nostall.gpu.clock import Clock, Run

SECONDS = 0.1
"""About how long one duel takes, once what Inductor makes is compiled."""
Layout = tuple[Sequence[int], Sequence[int], torch.dtype]


class AllSlower(Exception):
    """Every kernel is slower than what Inductor makes of the same operators."""


@dataclass
class Duels:
    """Of all kernels of one program's graph, forward and backward.  Without a clock there are none.

    ``patches`` is what the user set of Inductor's configuration.
    """

    clock: Clock | None
    settings: Settings
    patches: dict[str, Any]
    modules: list[GraphModule] = field(default_factory=list)

    def add(self, module: GraphModule) -> None:
        """A graph as Inductor is about to compile it."""
        if self.clock is not None and self.settings.keep == "faster":
            self.modules.append(copied(module))

    def losers(self, host: Host, limit: float) -> frozenset[str]:
        """The parts, by key, that stay with Inductor.  Each duel is fought once and kept.

        The kernels that move the most bytes come first; after ``limit`` seconds the others are put
        in untried, and so are all where something fails: the whole graph decides.  Where none is
        faster it decides about those that are not slower.  Raises :class:`AllSlower`.
        """
        if self.clock is None or not self.modules:
            return frozenset()
        try:
            with _as_if_nothing_ran(self.modules[0]):
                return self._losers(host, self.clock, limit)
        except AllSlower:
            raise
        except Exception as error:  # the graph is stitched all the same
            say_once(f"kernels were not compared on their own: {type(error).__name__}: {error}")
            return frozenset()

    def errands(self, host: InductorHost) -> Iterator[Errand]:
        """What Inductor has to compile before kernels can be compared, for another process; those
        that move the most bytes first."""
        kept, patches = Kept(), dict(host.patches)
        for key, rival in self._rivals(kept).items():
            if kept.answer(DuelRecord, key) is None:
                fakes, device = _placeholders(rival.module), _device(rival.module)
                inputs = [(tuple(x.shape), x.stride(), x.dtype, device, False) for x in fakes]
                around = replace(Surroundings.here(), grad=False)
                yield Errand(rival.module, tuple(inputs), patches, None, around)

    def _losers(self, host: Host, clock: Clock, limit: float) -> frozenset[str]:
        kept, until = Kept(), time.perf_counter() + limit
        found = self._rivals(kept)
        each = min(SECONDS, self.settings.seconds / max(1, len(found)))
        lost, slower = set[str](), set[str]()
        for key, rival in found.items():
            record = kept.answer(DuelRecord, key)
            if record is None and time.perf_counter() < until:
                record = _fought(key, rival, host, clock, each)
                kept.keep(key, record)
            parts = {part.key for part in rival.parts}
            lost |= parts if record is not None and record.lost else set()
            slower |= parts if record is not None and record.slower else set()
        every = {part.key for rival in found.values() for part in rival.parts}
        if every and slower == every:
            raise AllSlower("every kernel is slower than what Inductor makes of the same operators")
        return frozenset(slower if lost == every else lost)

    def _rivals(self, kept: Kept) -> dict[str, Rival]:
        """Each once, by name, in the order of what they move in all."""
        selection = Selection(self.settings.extent)
        found: dict[str, Rival] = {}
        moved: Counter[str] = Counter()
        for module in self.modules:
            parts = parts_of(module, kept, selection, Stitching())
            for rival in [] if parts is None else rivals(module, *parts):
                key = self._key(rival)
                found.setdefault(key, rival)
                moved[key] += rival.moved
        return {key: found[key] for key, _ in moved.most_common()}

    def _key(self, rival: Rival) -> str:
        inputs = _placeholders(rival.module)
        name = graph_key(rival.module, inputs, self.settings, self.patches)
        kernels = " ".join(part.kernel for part in rival.parts)
        return hashlib.sha256(f"{name} {kernels}".encode()).hexdigest()


def _fought(key: str, rival: Rival, host: Host, clock: Clock, seconds: float) -> DuelRecord:
    """Whatever fails leaves the kernels in: the whole graph decides."""
    kernels = tuple(part.kernel for part in rival.parts)
    record = DuelRecord(kernels=kernels, kind=clock.kind, clock=clock.name)
    try:
        inductor, stitched = _inductors(rival.module, host), _stitched(kernels, rival)
        samples = clock.samples(key, [inductor, stitched, inductor], seconds)
    except Exception as error:  # memory, a compiler: a duel is worth no failure
        reason = (str(error).strip().splitlines() or [""])[0]
        failure = f"{type(error).__name__}: {reason[:200]}"
        say_once(f"a kernel is put in without a comparison of its own: {failure}")
        return structs.replace(record, failure=failure)
    one, other, null = map(tuple, samples)
    return structs.replace(record, inductor=one, stitched=other, null=null)


def _inductors(module: GraphModule, host: Host) -> Run:
    fakes = _placeholders(module)
    inputs = _drawn([(x.shape, x.stride(), x.dtype) for x in fakes], _device(module))
    with as_traced(inputs) as traced:
        compiled = host.plain(module, traced)
    return lambda: compiled(*inputs)


def _stitched(kernels: Sequence[str], rival: Rival) -> Run:
    calls: list[tuple[Callable[..., Any], list[Tensor]]] = []
    for kernel in kernels:
        runner = resolve(kernel)
        inputs = _drawn(runner.launcher(None).inputs, _device(rival.module))
        calls.append((runner.direct, inputs))

    def run() -> None:
        for call, inputs in calls:
            call(inputs)

    return run


@contextlib.contextmanager
def _as_if_nothing_ran(module: GraphModule) -> Iterator[None]:
    """On the graph's device, without gradients or casts; the program's random numbers go on as
    before."""
    device = _device(module)
    on_gpu = device.type == "cuda"
    with (
        torch.cuda.device(device) if on_gpu else contextlib.nullcontext(),
        torch.random.fork_rng([device.index or 0] if on_gpu else []),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def _placeholders(module: GraphModule) -> list[Any]:
    return [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]


def _device(module: GraphModule) -> torch.device:
    found: torch.device = next(x.device for x in _placeholders(module) if isinstance(x, Tensor))
    return found


def _drawn(layouts: Sequence[Layout], device: torch.device) -> list[Tensor]:
    """Tensors with numbers as they come in programs."""
    draw = torch.Generator(device).manual_seed(0)
    found = []
    for shape, strides, dtype in layouts:
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        memory = torch.empty(span if 0 not in shape else 0, dtype=dtype, device=device)
        found.append(fill_tensor(memory, draw).as_strided(shape, strides))
    return found
