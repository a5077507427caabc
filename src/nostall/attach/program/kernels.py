"""Triton kernels of a program: their launches, and faster binaries of the store in their place.

Seen are launches ``kernel[grid](...)`` of the program.  Launches in graphs of ``torch.compile`` and
replays of CUDA graphs do not come here.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from nostall.attach.import_hooks import quietly
from nostall.attach.program.shadow import CLASSES, Call, Finding
from nostall.core.versions import supports_triton

MAX_KERNELS = 6
"""Kernels that are searched, those with most time."""
_PROBLEM = "a launch of a Triton kernel is not noted"
_STATE = ("kernel", "metadata", "module", "function", "_run")
"""What of a compiled kernel belongs to its binary."""


class Kernels:
    """The compiled Triton kernels that a program launches."""

    def __init__(self) -> None:
        self.found: dict[int, Any] = {}
        """By identity; the values keep the kernels alive, so that no identity is used again."""
        self.counts: Counter[int] = Counter()
        """Launches since :meth:`restart`, without those of an autotuner's trials."""
        self.described: dict[int, Any] | None = None
        """While launches are described: a :class:`.Source` of each kernel, or why it has none."""
        self.events: list[tuple[int, Any, Any]] = []
        """CUDA events around each launch that was described or repeated one."""
        self.seconds = 0.0
        """Time for the searches of all kernels."""
        self._trials = threading.local()
        self._patched: tuple[Any, Callable[..., Any], Callable[..., Any]] | None = None

    def install(self, module: ModuleType) -> None:
        """Note the launches of ``triton.runtime.jit``."""
        kernel_class, run = module.JITFunction, module.JITFunction.run

        @functools.wraps(run)
        def noted(function: Any, *args: Any, **options: Any) -> Any:
            begin = self._event() if self.described is not None else None
            compiled = run(function, *args, **options)
            if not options.get("warmup"):
                quietly(_PROBLEM, self._note, function, compiled, args, options, begin)
            return compiled

        self._patched = kernel_class, run, noted
        kernel_class.run = noted

    def skip_trials(self, module: ModuleType) -> None:
        """Leave the trials of ``triton.runtime.autotuner`` out."""
        bench = module.Autotuner._bench

        @functools.wraps(bench)
        def trial(*args: Any, **options: Any) -> Any:
            self._trials.running = True
            try:
                return bench(*args, **options)
            finally:
                self._trials.running = False

        module.Autotuner._bench = trial

    def restart(self) -> None:
        """Count from now on."""
        self.counts.clear()

    def remove(self) -> None:
        """Note no more launches."""
        self._patch(noted=False)

    def facts(self, steps: int) -> list[dict[str, Any]]:
        """Names and launches a step of the counted kernels, those with most launches first."""
        return [
            {"kernel": str(self.found[key].metadata.name), "launches": count / steps}
            for key, count in self.counts.most_common()
            if isinstance(self.found[key].asm.get("cubin"), bytes)
        ]

    def describe(self, seconds: float) -> None:
        """Describe the launches from now on, for searches of ``seconds`` in all."""
        self.described, self.seconds = {}, seconds
        self.events.clear()
        self.restart()
        self._patch(noted=True)

    def take(self) -> list[Described]:
        """The kernels that were described, those with most time first; ends :meth:`describe`."""
        described, self.described = self.described or {}, None
        self.remove()
        times: dict[int, float] = {}
        for key, begin, end in self.events:
            if end is not None:
                times[key] = times.get(key, 0.0) + begin.elapsed_time(end) / 1e3
        kernels = [
            Described(self.found[key], source, self.counts[key], times.get(key))
            for key, source in described.items()
        ]
        self.events.clear()
        return sorted(kernels, key=lambda k: k.seconds or k.launches, reverse=True)

    def _patch(self, *, noted: bool) -> None:
        if self._patched is not None:
            kernel_class, run, watched = self._patched
            if kernel_class.run in (run, watched):  # else the program has replaced it
                kernel_class.run = watched if noted else run

    def _note(
        self, function: Any, compiled: Any, args: Any, options: Mapping[str, Any], begin: Any
    ) -> None:
        if compiled is None or getattr(self._trials, "running", False):
            return
        key = id(compiled)
        self.found[key] = compiled
        self.counts[key] += 1
        if self.described is None or _is_capturing():
            return
        if begin is not None:
            self.events.append((key, begin, self._event()))
        if key not in self.described:
            self.described[key] = _describe(function, compiled, args, options)

    def _event(self) -> Any:
        """A recorded CUDA event; None where PyTorch uses no GPU, or captures a graph."""
        cuda = _cuda()
        if cuda is None or _is_capturing():
            return None
        event = cuda.Event(enable_timing=True)
        event.record()
        return event


def _cuda() -> Any:
    """``torch.cuda`` if the program uses it; else None."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _is_capturing() -> bool:
    """Whether launches go into a CUDA graph, which a read of a value would break."""
    cuda = _cuda()
    return bool(cuda is not None and cuda.is_current_stream_capturing())


class Described:
    """A kernel whose launches in one step were described."""

    def __init__(self, compiled: Any, source: Any, launches: int, seconds: float | None) -> None:
        """``seconds``: between CUDA events around its launches, gaps included; None without."""
        self.compiled, self.source = compiled, source
        self.launches, self.seconds = launches, seconds

    @property
    def name(self) -> str:
        return str(self.compiled.metadata.name)


def _describe(function: Any, compiled: Any, args: Any, options: Mapping[str, Any]) -> Any:
    """The :class:`.Source` of a launch, or the reason why it cannot be searched."""
    from nostall.attach.first_call import capture_source, reason_of  # lazy: it imports the tuner

    try:
        if not isinstance(compiled.asm.get("cubin"), bytes):
            return "it is not for an NVIDIA GPU"
        values = {**dict(zip(function.arg_names, args, strict=False)), **options}
        bounds = {
            name: max(1, int(value.max()) + 1)
            for name, value in values.items()
            if hasattr(value, "data_ptr") and not getattr(value.dtype, "is_floating_point", True)
        }
        known = {name: value for name, value in options.items() if name != "warmup"}
        return capture_source(function, compiled, args, known, bounds)
    except Exception as error:  # any error: the kernel stays as it is
        return reason_of(error)


class NativeKernels:
    """The store's binaries of the program's own Triton kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.tell_search: Callable[[Mapping[str, Any]], None] = lambda _: None
        """Gets what is in the store before each search, which may never answer."""
        self._searched: list[Mapping[str, Any]] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._swaps: dict[int, _Swap] = {}

    def missing(self) -> str:
        """Why nothing would be changed; empty if something would."""
        self.on()
        if any(swap.is_on for swap in self._swaps.values()):
            return ""
        return "the store has no binary for the Triton kernels that it launches"

    def check(self, calls: Mapping[int, Sequence[Call]]) -> Finding:
        """Search the kernels with most time; binaries are stored once they are proven."""
        from nostall.attach.first_call import tune_in_subprocess

        del calls
        described = self.kernels.take()
        if not described:
            reason = "none of its kernels is launched: compiled or captured graphs have them"
            return Finding(CLASSES[0], reason)
        version = str(sys.modules["triton"].__version__)
        if not supports_triton(version):
            return Finding(CLASSES[0], f"Triton {version} is not supported by this nostall")
        self._answers.clear()
        describable = [k for k in described if not isinstance(k.source, str)]
        for kernel, seconds in _parts(describable[:MAX_KERNELS], self.kernels.seconds):
            answer = self._answer(kernel)
            swap = self._swap(kernel.compiled)
            if not swap.turn_on() and not seconds:
                answer["reason"] = "its part of the time is too small for a search"
            elif not swap.is_on:
                self._searched.append(_stored(kernel.source.cubin))
                self.tell_search(self._searched[-1])
                ordinal = sys.modules["triton"].runtime.driver.active.get_current_device()
                answer |= tune_in_subprocess(kernel.source, seconds, int(ordinal))
                answer["searched"] = swap.turn_on()
            answer |= swap.answer()
        self._answer_others(described)
        self.off()
        if all(answer["record"] is None for answer in self.answers):
            reasons = [f"{a['kernel']}: {a['reason']}" for a in self.answers[:MAX_KERNELS]]
            return Finding(CLASSES[0], f"no kernel got faster: {'; '.join(reasons)}")
        return Finding(CLASSES[0])

    def forget(self) -> None:
        """Remove what its searches stored: nobody is left to prove it."""
        from nostall.store import Store

        store = Store()
        for row in store.rows():
            if any(
                row.original == searched["original"] and row.id not in searched["known"]
                for searched in self._searched
            ):
                store.remove(row)

    def _answer_others(self, described: Sequence[Described]) -> None:
        """Kernels that are not searched: an earlier record, or why there is none."""
        known = {id(kernel.compiled): kernel for kernel in described}
        self.on()
        for key, compiled in self.kernels.found.items():
            kernel = known.get(key, Described(compiled, "no launch in that step", 0, None))
            swap = self._swaps.get(key)
            has_record = swap is not None and swap.is_on
            if key in self._answers or not (key in known or has_record):
                continue
            later = f"{MAX_KERNELS} kernels with more time were searched"
            answer = self._answer(kernel)
            answer["reason"] = kernel.source if isinstance(kernel.source, str) else later
            if swap is not None:
                answer |= swap.answer()

    def _answer(self, kernel: Described) -> dict[str, Any]:
        answer = {
            "kernel": kernel.name, "launches": kernel.launches, "event_seconds": kernel.seconds,
            "seconds": None, "record": None, "ratio": None, "searched": False, "reason": "",
        }  # fmt: skip
        self._answers[id(kernel.compiled)] = answer
        return answer

    @property
    def answers(self) -> list[dict[str, Any]]:
        """What :meth:`check` found of each kernel."""
        return list(self._answers.values())

    def _swap(self, compiled: Any) -> _Swap:
        return self._swaps.setdefault(id(compiled), _Swap(compiled))

    def on(self) -> None:
        for compiled in list(self.kernels.found.values()):
            if isinstance(compiled.asm.get("cubin"), bytes):
                self._swap(compiled).turn_on()

    def off(self) -> None:
        for swap in self._swaps.values():
            swap.turn_off()


class _Swap:
    """A compiled kernel with two binaries: its own and the store's."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.is_on = False
        self.record: str | None = None
        """Id of the store's record."""
        self._own: dict[str, Any] = {}
        self._other: dict[str, Any] | None = None

    def turn_on(self) -> bool:
        """Whether the store's binary is used from the next launch on."""
        from nostall.attach.optimize import replace_cubin
        from nostall.store import Store

        if self.is_on:
            return True
        own = self._state()
        if self._other is not None:
            self._set(self._other)
        elif replace_cubin(self.compiled):
            self.record = str(self.compiled.nostall_record)
        elif not Store().is_optimised(self.compiled.asm["cubin"]):  # by Triton's cache manager
            return False
        self._own, self.is_on = own, True
        return True

    def answer(self) -> dict[str, Any]:
        """The record and its gain; nothing if the own binary runs."""
        from nostall.store import Store

        if not self.is_on:
            return {}
        if self.record is None:
            return {"reason": "it runs a binary of the store already"}
        row = Store().find(self.record)[0]
        return {"record": row.id, "ratio": row.ratio, "reason": ""}

    def turn_off(self) -> None:
        """The program's own binary is used from the next launch on."""
        if self.is_on:
            self._other, self.is_on = self._state(), False
            self._set(self._own)

    def _state(self) -> dict[str, Any]:
        return {name: getattr(self.compiled, name) for name in _STATE}

    def _set(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self.compiled, name, value)
        self.compiled.asm["cubin"] = state["kernel"]
        self.compiled.asm.pop("sass", None)


def _stored(cubin: bytes) -> dict[str, Any]:
    """The sha256 of a binary, and the ids of the store's records for it."""
    from nostall.store import Store

    sha256 = hashlib.sha256(cubin).hexdigest()
    ids = [row.id for row in Store().rows() if row.original == sha256]
    return {"original": sha256, "known": ids}


def _parts(kernels: Sequence[Described], seconds: float) -> list[tuple[Described, float]]:
    """The seconds of each kernel's search, by its time and the gains measured for its kind."""
    from nostall.sass import Program
    from nostall.tuning.launches.recorded import RecordedLaunch
    from nostall.tuning.program import ProgramKernel, Start, divide
    from nostall.tuning.room import kind_of

    found: dict[int, Described] = {}
    weighed = []
    for kernel in kernels:
        source, time = kernel.source, kernel.seconds or float(kernel.launches)
        kind = kind_of(Program.of_kernel(source.cubin, source.kernel).kernel(source.kernel))
        launch = RecordedLaunch(kernel.name, None, kernel.launches, {}, ())
        start = Start(source, time / kernel.launches, None)
        weighed.append(ProgramKernel(start, launch, kernel.launches, time, kind))
        found[id(weighed[-1])] = kernel
    results = divide(seconds, weighed, "assembler") if weighed else []
    return [(found[id(r.kernel)], r.budget) for r in results]
