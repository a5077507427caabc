"""The half of ``nostall optimize`` inside the user's program: watches steps and obeys orders."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nostall.attach.program.blocks import Schedule, Step, Warming
from nostall.attach.program.changes import (
    Change,
    Compile,
    compiled_graphs,
    has_images,
    is_in_torch,
    make_change,
    optimizer_changes,
)
from nostall.attach.program.changing.captured import CapturedOptimizer
from nostall.attach.program.changing.generation import GenerateCall, can_be_static, generated
from nostall.attach.program.changing.loader import look_at
from nostall.attach.program.changing.losses import CompiledLoss, Losses
from nostall.attach.program.changing.settings import (
    AttentionCalls,
    driver_calls,
    matmul_precision,
    why_not_expandable,
)
from nostall.attach.program.channel import Channel
from nostall.attach.program.kernels import Kernels, NativeKernels
from nostall.attach.program.machine import (
    cpu_name,
    driver_version,
    local_world,
    rank,
    transformers_version,
)
from nostall.attach.program.periods import Borders
from nostall.attach.program.roots import (
    MAX_CALLS,
    MAX_GRADIENTS,
    LastGradients,
    Switch,
    called_parts,
    find_roots,
    model_identity,
    obstacle,
    shapes,
    source_identity,
)
from nostall.attach.program.segments import PARTS, Segments
from nostall.attach.program.shadow import (
    Call,
    clone,
    current_autocast,
    restore_version_limit,
)
from nostall.attach.program.tracing import Trace, open_trace

_clock = time.perf_counter
"""Taken before the program runs, which may replace it."""
SETTLED = 2
"""First steps that are not part of the watch: allocations, first calls."""
MIN_STEPS = 4
"""Fewest steps that a watch needs."""
TRACED = 3
"""Steps of a trace on GPUs, after the watched ones; the profiler slows them."""
MAX_KEYS = 10_000
"""Different steps that are told apart; each further one has a key of its own."""
PROFILED = "under a profiler of the program"
"""In the key of a step that such a profiler records, which makes it slower."""
MAX_CHECKED = 2
"""Calls with different shapes that a check repeats."""
ABANDONED_SECONDS = 2.0
"""Between two looks at whether ``nostall optimize`` still runs."""


class Session:
    """What one process of the program has shown, and what it was told to do."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.channel = Channel(settings["folder"], settings["director"])
        self.borders = Borders()
        self.segments = Segments(_clock, look_at)
        self.kernels = Kernels()
        self.losses = Losses(lambda: not self.segments.is_inside)
        self.attention = AttentionCalls()
        self._optimizers: list[weakref.ref[Any]] = []
        self.switches: list[Switch] = []
        self.switch_obstacle = "no step has ended"
        self.changes: dict[str, Change] = {}
        self._kept: set[str] = set()
        """Names of changes on top of which others were measured."""
        self.steps = self.optimizer_steps = 0
        self._calls: list[Any] = []
        self._keys: dict[Any, int] = {}
        self._captures: dict[int, dict[Any, Call | GenerateCall]] | None = None
        self._generates = False
        """Whether a step calls ``generate`` of a model whose cache could be static."""
        self._order: Mapping[str, Any] | None = None
        self._phase: Schedule | Warming | None = None
        self._watched: list[tuple[int, float, dict[str, float]]] | None = []
        self._last = self._looked = 0.0
        self._ended = self._busy = self._gave_up = False
        self._closing_changes, self._uninstalled = 0, True
        self._keeps_gradients = False
        """Whether a gradient of one step was seen in the next one, and not made anew."""
        self._gradients = LastGradients()
        self.roots: list[Any] = []
        self.called: Sequence[weakref.ref[Any]] = ()
        """Modules that no other module called before the first step."""
        self._current: Mapping[str, Any] = {}
        self._overflows: list[Any] = []
        self._devices: set[Any] = set()
        """GPUs with parameters of the roots."""
        self._watch_began = 0.0
        self._driver_calls = 0
        self._trace: Trace | None = None
        self._usual = 0
        """Key of the most frequent watched steps."""
        self._facts_known: dict[str, Any] = {}
        """Of the watched steps, while more are traced."""

    @property
    def optimizers(self) -> list[Any]:
        """The optimisers that have stepped and still live."""
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def on_optimizer(self, optimizer: Any, skipped: bool = False) -> None:
        """A step of an optimiser has ended, or a GradScaler has left it out."""
        self.optimizer_steps += 1
        if self._busy or self._ended:
            return
        if self._gave_up:
            self.on_border()
            return
        self.segments.optimizer_ends()
        if all(optimizer is not known for known in self.optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        found = getattr(optimizer, "found_inf", None)
        if skipped or found is not None:
            self._overflows.append(True if found is None else found)
        if self.settings.get("step") is None and self.borders.note(id(optimizer)):
            self.on_border()

    def calls_noted(self) -> int:
        """How many calls of this step are noted so far."""
        return len(self._calls)

    def on_generate(self, model: Any, call: GenerateCall, result: Any, before: int) -> None:
        """A call of ``generate`` has ended; it counts as one call, for the calls since ``before``.

        A step is then the same whichever cache it has: decoding that is compiled makes no calls
        that are seen.
        """
        if self._busy or self._ended:
            return
        form = shapes((call.args, call.kwargs, result))
        self._calls[before:] = [(generated(model), (model.training, False), form)]
        self._generates = self._generates or can_be_static(model)
        if self._captures is not None:
            with contextlib.suppress(Exception):  # any error of a user's __deepcopy__
                # A streamer is of the program's output, and often no copy of it can be made.
                given = {name: v for name, v in call.kwargs.items() if name != "streamer"}
                args, kwargs = clone((call.args, given))
                kept = call._replace(args=args, kwargs=kwargs)
                self._captures.setdefault(generated(model), {})[0] = kept

    def on_border(self) -> None:
        """A step of the program has ended."""
        if self._busy or self._ended:
            return
        if self._gave_up:
            self._obey_end()
            return
        self._busy = True
        try:
            self._border()
        except KeyboardInterrupt:
            self._obey_end()
            raise
        except Exception as error:  # any error: the program runs on, as it was
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._busy = False

    def at_exit(self) -> None:
        """The process ends."""
        if self.channel.is_abandoned():  # killed since the last look: nobody else removes it
            self._forget_kernels()
            self.channel.remove()
        elif self.steps and not self._ended:
            if self._watched is not None and len(self._watched) >= SETTLED + MIN_STEPS:
                self._end_watch(self._watched[SETTLED:])
            elif self._trace is not None:
                self._stop_trace()
                self._emit_watched(trace_obstacle="the program ended before")
            self.channel.emit("exit", steps=self.steps)

    def forget(self) -> None:
        """In a forked child: its steps are not those of the program."""
        self._ended = True

    def _border(self) -> None:
        now = _clock()
        self.steps += 1
        step = Step(self._key(), self._take_overflows(), compiled_graphs())
        if self.borders.changes != self._closing_changes:
            self._closing_changes = self.borders.changes
            if self._watched is None:
                self._give_up(f"{self.borders.change}, so that steps are no longer the same")
                return
            self.steps = 1  # ranks agree on steps of the optimiser that all of them have
            self._watched, self._uninstalled = [], True
            self._release()
        elif self._uninstalled:
            self._uninstalled = False
            self._install_switches()
        elif self._watched is not None:
            self._watch(step, now)
        elif self._trace is not None:
            self._trace_step(step)
        if self._phase is not None and self._phase.border(step):
            self._phase = None
            self._finish(seconds=_clock() - self._last)
        self._obey(now)
        self._last = _clock()

    def _key(self) -> int:
        calls = (*self._calls[: MAX_CALLS + 1], len(self._calls))
        self._calls.clear()
        is_profiled = sys.modules["torch"].autograd.profiler._is_profiler_enabled
        if is_profiled and self._trace is None:
            calls = (PROFILED, *calls)
        if len(self._keys) > MAX_KEYS:
            return self._keys.get(calls, -self.steps)
        return self._keys.setdefault(calls, len(self._keys))

    def _take_overflows(self) -> list[Any]:
        found, self._overflows = self._overflows, []
        return found

    def _install_switches(self) -> None:
        optimizers = [] if self.settings.get("step") else self.optimizers
        called = [module for known in self.called if (module := known()) is not None]
        parts = [part for root in find_roots(optimizers) for part in called_parts(root, called)]
        found = list({id(part): part for part in parts}.values())
        self.roots, self.borders.modules = self.borders.modules or found, []
        obstacles = [reason for root in self.roots if (reason := obstacle(root))]
        self._devices = {p.device for r in self.roots for p in r.parameters() if p.is_cuda}
        if compiled_graphs():
            self.switch_obstacle = "parts of the program run under torch.compile already"
        elif not self.roots:
            self.switch_obstacle = "no module holds the parameters of the optimisers"
        elif obstacles:
            self.switch_obstacle = obstacles[0]
        else:
            self.switch_obstacle = ""
            self.switches = [Switch(root, self._calls, self._capture) for root in self.roots]
            self.losses.install(sys.modules["torch"].nn.functional)
            self.attention.install(sys.modules["torch"].nn.functional)
            for number, switch in enumerate(self.switches):
                switch.number, switch.obey_end = number, self._obey_end
                switch.eager = self.segments.timed("forward", switch.eager)

    def _watch(self, step: Step, now: float) -> None:
        assert self._watched is not None
        parts = self.segments.take()
        self._watched.append((step.key, now - self._last, parts))
        kept = self._watched[SETTLED:]
        self._keeps_gradients |= self._gradients.live_on(
            self.roots, MAX_GRADIENTS if kept else None
        )
        if not kept:
            self._sync()
            self.kernels.restart()
            self._driver_calls = driver_calls()
            self._watch_began = _clock()
        enough = len(kept) >= self.settings["watch_steps"]
        longest = sum(seconds for _, seconds, _ in kept) >= self.settings["watch_seconds"]
        if enough or (longest and len(kept) >= MIN_STEPS):
            self._end_watch(kept, traces=True)

    def _end_watch(
        self, kept: Sequence[tuple[int, float, dict[str, float]]], traces: bool = False
    ) -> None:
        self._watched = None
        self.segments.remove()
        self.kernels.remove()
        self.attention.remove()
        for switch in self.switches:
            switch.eager = switch.root._call_impl
        if self.switches and not any(isinstance(part, tuple) for key in self._keys for part in key):
            self.switch_obstacle = "the modules are not called as module(...), only by a method"
        if (world := rank()[1]) > local_world(world):
            self._give_up(f"{world} ranks run on several hosts; start all of them on one host")
            return
        self._facts_known = self._facts(kept)
        if not self.losses.largest:
            self.losses.settle()
        self._start_trace("" if traces else "the program ended before")

    def _start_trace(self, reason: str) -> None:
        """Trace the steps that follow, or tell the reason why that is not done."""
        late = not (self.settings.get("trace") or self._current)
        reason = (
            reason or (not self._facts_known["cuda"] and "only steps on GPUs are traced")
            or (late and "steps are traced after all attempts, because later steps stay slower")
            or (self._facts_known["rank"] and "rank 0 is traced") or ""
        )  # fmt: skip
        opened = reason or open_trace(f"{self.settings['folder']}/trace.json")
        if isinstance(opened, str):
            self._emit_watched(trace_obstacle=opened)
        else:
            self._trace = opened

    def _trace_step(self, step: Step) -> None:
        trace = self._trace
        assert trace is not None
        trace.is_usual = trace.is_usual and step.key == self._usual
        if trace.steps + 1 < TRACED:
            trace.step()
            return
        self._sync()
        trace.step(last=True)
        self._trace = None
        self._emit_watched(**trace.finish())

    def _stop_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.stop()

    def _emit_watched(self, **trace: Any) -> None:
        known: dict[str, Any] = {"trace_file": None, "trace_obstacle": "", "padded": [], **trace}
        if self._current:  # the order of a trace
            self._finish(**known)
            return
        self.channel.emit("watched", **self._facts_known, **known)

    def _facts(self, kept: Sequence[tuple[int, float, dict[str, float]]]) -> dict[str, Any]:
        torch = sys.modules["torch"]
        on_gpu = bool(torch.cuda.is_available() and torch.cuda.is_initialized())
        number, world = rank()
        self._sync()  # else the host's clock is ahead of the device
        seconds = _clock() - self._watch_began
        self._usual = counts = Counter(key for key, _, _ in kept).most_common(1)[0][0]
        return {
            "rank": number,
            "world": world,
            "device": torch.cuda.get_device_name() if on_gpu else cpu_name(),
            "driver": driver_version() if on_gpu else None,
            "cuda": on_gpu,
            "torch": torch.__version__,
            "transformers": transformers_version() if self._generates else None,
            "threads": torch.get_num_threads(),
            "processors": len(os.sched_getaffinity(0)),
            "steps": [(key, seconds) for key, seconds, _ in kept],
            "mean_seconds": seconds / len(kept),
            "calls": self._count_calls(counts),
            "parts": {p: [parts[p] for _, _, parts in kept] for p in PARTS},
            "period": self.borders.period,
            "step_is": self.borders.found,
            "matmul_precision": matmul_precision(),
            "optimizers": [type(o).__name__ for o in self.optimizers[:8]],
            "flags": optimizer_changes(self.optimizers),
            "roots": [type(root).__name__ for root in self.roots],
            "identity": {"model": model_identity(self.roots), "sources": source_identity()},
            "keeps_gradients": self._keeps_gradients,
            "kept_graph": self.segments.kept_graph,
            "loss_elements": self.losses.largest,
            "in_torch": any(is_in_torch(root) for root in self.roots),
            "images": any(has_images(root) for root in self.roots),
            "generates": self._generates,
            "kernels": self.kernels.facts(len(kept)),
            "obstacle": self.switch_obstacle,
            "loader": {
                **self.segments.loaders,
                "batches": self.segments.batches,
                "on_gpu": self.segments.loads_on_gpu,
            },
            "attention": self.attention.facts(),
            "driver_calls": driver_calls() - self._driver_calls,
            "not_expandable": why_not_expandable(),
            "peak_bytes": torch.cuda.max_memory_allocated()
            if on_gpu
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "main_thread": threading.current_thread() is threading.main_thread(),
            "checksum": self._checksum(),
        }

    def _count_calls(self, number: int) -> int:
        """Calls with gradients in a step whose key has this number; of long steps, at most."""
        key = next((key for key, known in self._keys.items() if known == number), (0,))
        count = int(next(part for part in reversed(key) if type(part) is int))
        noted = [part[1] for part in key if isinstance(part, tuple)]
        with_gradients = sum(bool(has_gradients) for _, has_gradients in noted)
        return count - len(noted) + with_gradients if with_gradients else 0

    def _obey(self, now: float) -> None:
        order = self.channel.new_order()
        if order is not None:
            self._order, self._phase, self._captures = order, None, None
        elif now - self._looked > ABANDONED_SECONDS:
            self._looked = now
            if self.channel.is_abandoned():
                self._forget_kernels()
                self._give_up("nostall optimize has ended; the program runs on as it was")
                self._ended = True
                self.channel.remove()
                return
        order = self._order
        if order is None or not self._is_time(order):
            return
        if self._captures is not None:
            self._capture_done(now, order)
            return
        self._order, self._current = None, order
        self._start(order, now)

    def _forget_kernels(self) -> None:
        """Binaries that were not in the kept part of a comparison are not proven."""
        for name, change in self.changes.items():
            if isinstance(change, NativeKernels) and name not in self._kept:
                with contextlib.suppress(Exception):  # of the store; the program runs on
                    change.forget()

    def _is_time(self, order: Mapping[str, Any]) -> bool:
        """Whether the order begins here; all ranks of a job begin at one step."""
        if not order["agree"]:
            return True
        # Collectives of this step have then run, so that no rank is more than a step ahead.
        self._sync()
        number, (own, world) = order["number"], rank()
        start = self.channel.start(number)
        if start is None:
            self.channel.note_seen(number, own, self.steps)
            if own == 0 and len(seen := self.channel.seen(number, world)) == world:
                start = max(seen) + 3
                self.channel.agree(number, start)
        return start is not None and self.steps >= start

    def _start(self, order: Mapping[str, Any], now: float) -> None:
        what = order["do"]
        if what == "end":
            self._end(order)
        elif what == "check":
            self._make(order)
            if isinstance(change := self.changes[order["name"]], NativeKernels):
                change.tell_search = lambda stored: self._emit_answer("search", **stored)
                self._apply(order["arm"])
                self.kernels.describe(order["seconds"])
            self._captures, self._order, self._capture_until = {}, order, now + 60.0
            self.losses.wanted = isinstance(change, CompiledLoss)
        elif what == "trace":
            self._apply(())
            self._start_trace("")
        elif what == "warm":
            self._make(order)
            self._apply(order["arm"])
            arm = [self.changes[name] for name in order["arm"]]
            waited = [c for c in arm if isinstance(c, Compile | CapturedOptimizer)]
            self._phase = Warming(order, _clock, lambda: all(c.is_settled() for c in waited))
        elif what == "blocks":
            self._kept |= set(order["arms"][0])
            self._phase = Schedule(
                order, apply=self._apply, sync=self._sync, now=_clock, emit=self._emit_answer
            )

    def _capture_done(self, now: float, order: Mapping[str, Any]) -> None:
        """Check the change once calls were seen; where modules are not switched, at once."""
        assert self._captures is not None
        change = self.changes[order["name"]]
        if isinstance(change, CompiledLoss) and self.losses.wanted and now < self._capture_until:
            return
        others = NativeKernels | CompiledLoss
        needs_calls = not (self.switch_obstacle or isinstance(change, others))
        wanted = len(self.switches) if needs_calls else 0
        if sum(number >= 0 for number in self._captures) < wanted and now < self._capture_until:
            return
        calls: dict[int, list[Any]] = {
            number: list(found.values()) for number, found in self._captures.items()
        }
        self._captures = self._order = None
        self._sync()
        begin = _clock()
        finding = change.check(calls)
        if isinstance(change, NativeKernels):
            self._emit_answer("kernels", kernels=change.answers)
        self._finish(**finding._asdict(), seconds=_clock() - begin)

    def _capture(self, switch: Switch, arguments: Any) -> None:
        if self._captures is None or self._busy or self.kernels.described is not None:
            return
        found = self._captures.setdefault(switch.number, {})
        key = self._calls[-1]
        if key is None and found:  # a later call of the step, whose shapes are not noted
            return
        if len(found) < MAX_CHECKED and key not in found:
            torch = sys.modules["torch"]
            try:
                args, kwargs = clone(arguments)
            except Exception:  # any error of a user's __deepcopy__, or too little memory
                return
            mode = switch.root.training, torch.is_grad_enabled()
            found[key] = Call(args, kwargs, *mode, current_autocast())

    def _make(self, order: Mapping[str, Any]) -> None:
        for description in order["changes"]:
            if description["name"] not in self.changes:
                closing = self.borders.closing
                change = make_change(
                    description, self.switches, self.optimizers, self.kernels,
                    next((o for o in self.optimizers if id(o) == closing), None), self.losses,
                )  # fmt: skip
                self.changes[description["name"]] = change

    def _apply(self, arm: Sequence[str]) -> None:
        for name, change in self.changes.items():
            if name not in arm:
                change.off()
        # Compiled code is of the settings and layouts that are on.
        for change in sorted((self.changes[n] for n in arm), key=lambda c: type(c) is Compile):
            change.on()

    def _sync(self) -> None:
        """Wait for the GPUs that the program uses, all streams of each."""
        _sync(self._devices)

    def _release(self) -> None:
        """Nothing is switched any more: the modules run their version without nostall."""
        for switch in self.switches:
            switch.settle()
        self.losses.settle()
        self.switches, self.roots, self.changes = [], [], {}

    def _emit_answer(self, event: str, **fields: Any) -> None:
        failed = [*(switch.failure for switch in self.switches), self.losses.failure]
        captured = (c for c in self.changes.values() if isinstance(c, CapturedOptimizer))
        failed += [steps.failure for c in captured for steps in c.captured if steps.is_on]
        failures = [failure for failure in failed if failure]
        self.channel.emit(event, order=self._current["number"], failures=failures, **fields)

    def _finish(self, **fields: Any) -> None:
        self._emit_answer("done", checksum=self._checksum(), **fields)
        for switch in self.switches:
            switch.failure = None
        self.losses.failure = ""

    def _end(self, order: Mapping[str, Any]) -> None:
        self._ended = True
        self._take_back()
        self.channel.emit("ended", steps=self.steps, exits=order["exit"])
        if order["exit"]:
            sys.stdout.flush()
            raise SystemExit(0)

    def _obey_end(self) -> None:
        """After giving up, and when interrupted, the end is the only order that is obeyed."""
        order = self.channel.new_order()
        if order is not None and order["do"] == "end":
            self._end({**order, "arm": ()})

    def _give_up(self, reason: str) -> None:
        self._gave_up, self._watched, self._phase = True, None, None
        self._take_back()
        with contextlib.suppress(Exception):
            self.channel.emit("failed", reason=reason[:300])

    def _take_back(self) -> None:
        """All changes are off, and nothing is noted any more, whichever of these fails."""
        parts = [self._stop_trace, *(change.off for change in self.changes.values())]
        for part in (*parts, self._release, self.segments.remove, self.kernels.remove,
                     self.attention.remove, restore_version_limit):  # fmt: skip
            with contextlib.suppress(Exception):
                part()

    def _checksum(self) -> list[float]:
        """A sum over the parameters, equal on all ranks of a data-parallel program."""
        with contextlib.suppress(Exception):
            first = [p for root in self.roots for p in list(root.parameters())[:4]][:8]
            return [float(p.detach().double().abs().sum()) for p in first]
        return []


def _sync(devices: Collection[Any] = ()) -> None:
    """Wait for the current GPU and ``devices``, where a GPU is used."""
    torch = sys.modules["torch"]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        for device in devices:
            torch.cuda.synchronize(device)
