"""What each level can gain at most in a watched program, and what nostall can only advise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from nostall.attach.program.changes import GRAPHS as REDUCED
from nostall.attach.program.changes import MARKED
from nostall.attach.program.changing.loader import KIND as LOADER
from nostall.attach.program.kernels import MAX_KERNELS

NO_GAIN = 1.05
"""Below this bound of all levels together, nothing is tried."""
MAX_BUSY = 1.1
"""Work of a traced step over the time of a watched one above which they are not comparable."""
MUCH_LOADING, MOST_WORKERS = 0.05, 4
"""Share of a step in a loader without workers from which some are tried, and their number."""
MIN_IDLE = 0.05
"""Share of a step in which the device does nothing from which CUDA graphs are tried."""
MIN_STEPS = 10
"""Watched steps that a certificate needs."""
MUCH_IDLE = 0.3
"""The same from which they are tried before `torch.compile` alone."""
MOST_CALLS = 8
"""Calls with gradients in a step, with which CUDA graphs are tried."""
RANKS = "ranks wait for each other in what a change does not touch"
STATIC = "static cache"
GRAPHS = "CUDA graphs"
NOSTALL = "back end nostall"
LOSS = "compiled loss"
NATIVE = "native kernels"
COMPILE = "torch.compile"
SEGMENTS = "expandable segments"
TF32 = "TF32"
CHANGES_NUMBERS = "changes numbers"
"""The class of a change that is tried only with ``--allow-numerics``."""
INCLUDED = {GRAPHS: (COMPILE,), STATIC: (COMPILE, GRAPHS, NOSTALL)}
"""What needs no attempt where another change is kept: graphs are of compiled code, and with a
static cache transformers compiles the steps of its ``generate``."""
SEARCH_SECONDS, SEARCH_SHARE = 90.0, 0.15
"""Most seconds of the searches of all kernels, and their share of the time for attempts."""
KERNEL_SECONDS = 15.0
"""Of one kernel beside its search: a process, first and last measurements.  Assumed."""
EVIDENCE = "1.10 to 2.34 on six models, H200 (docs/results/torch-compile.md)"
"""Measured gain of torch.compile over eager mode."""
CAPTURED_GAIN = "1.14 to 1.44 on four of eight programs, H200 (docs/results/optimize.md)"


@dataclass(frozen=True)
class Facts:
    """What was seen of the watched steps."""

    raw: Mapping[str, Any]

    @property
    def step_seconds(self) -> float:
        """Median seconds of the most frequent kind of step; on GPUs the mean of all.

        A GPU works behind the host, so that only the whole watch, which ends with a wait for it,
        shows the time of a step.
        """
        if self.raw["cuda"]:
            return float(self.raw["mean_seconds"])
        return median(float(seconds) for key, seconds in self.raw["steps"] if key == self.usual)

    @property
    def usual(self) -> int:
        """The key of the most frequent kind of step."""
        return Counter(int(key) for key, _ in self.raw["steps"]).most_common(1)[0][0]

    @property
    def varied(self) -> bool:
        """Whether steps differ so much that each must be timed."""
        keys = [key for key, _ in self.raw["steps"]]
        return keys.count(self.usual) < 0.9 * len(keys)

    @property
    def never_repeats(self) -> bool:
        """Whether no two watched steps did the same work."""
        keys = [key for key, _ in self.raw["steps"]]
        return len(set(keys)) == len(keys)

    def share(self, *parts: str) -> float:
        """Share of the step in some parts: forward, backward, optimizer, loader."""
        inside = [1 - outside / seconds for seconds, outside in self._outside(parts)]
        return min(1.0, max(0.0, median(inside)))  # a backward pass can end in the next step

    @property
    def rest(self) -> float:
        """Share of the step outside of all parts."""
        return 1 - self.share("forward", "backward", "optimizer", "loader")

    def bound(self, *parts: str) -> float | None:
        """The step over what is outside of ``parts``; None if no bound can be given.

        It is the upper quartile over the steps, so that a pause of the machine, which falls outside
        of all parts, does not lower it.  Work of a GPU overlaps the host's, so that its bound is
        the step over what the device must still do, which a trace shows.
        """
        if self.raw["world"] > 1:
            return None
        if self.raw["cuda"]:
            left = None if self.no_bound(*parts) else self.left(*parts)
            return None if left is None else max(1.0, self.step_seconds / left)
        pairs = self._outside(parts)
        if any(outside <= 0.001 * seconds for seconds, outside in pairs):
            return None
        return sorted(seconds / outside for seconds, outside in pairs)[3 * len(pairs) // 4]

    def left(self, *parts: str) -> float | None:
        """Seconds of a step that remain if a GPU did nothing for ``parts``; None if unknown."""
        trace, compiles = self.raw["trace"], "forward" in parts
        optimizes = "optimizer" in parts
        if "busy" not in trace or not (compiles or optimizes):
            return None
        name = "both" if compiles and optimizes else "compile" if compiles else "optimizer"
        loader = self.raw["loader"]
        # A loader that fills memory of the GPU waits for it, which gets shorter.
        is_own = not (loader.get("workers") or loader.get("on_gpu"))
        reading = median(self.raw["parts"]["loader"]) if is_own else 0.0
        return max(float(trace[f"without_{name}"]), reading) or None

    def no_bound(self, *parts: str) -> str:
        """Why no bound can be given on a GPU; empty if one can."""
        trace = self.raw["trace"]
        if self.raw["world"] > 1:  # a wait gets shorter, too, if the other rank gets faster
            return RANKS
        if "busy" not in trace:
            return str(trace["obstacle"])
        if self.varied:
            return "steps differ, and only some were traced"
        if trace["busy"] > MAX_BUSY * self.step_seconds:
            return "the traced steps did more work than the watched ones"
        return str(trace["obstacle"]) if "forward" in parts else ""

    @property
    def idle(self) -> float | None:
        """Share of a step in which the GPU does nothing; None if it is not known."""
        if not self.raw["cuda"] or self.no_bound():
            return None
        return max(0.0, 1 - float(self.raw["trace"]["busy"]) / self.step_seconds)

    def _outside(self, parts: Sequence[str]) -> list[tuple[float, float]]:
        """For each step of the usual kind, its seconds and those outside of ``parts``."""
        lists = self.raw["parts"]
        return [
            (seconds, seconds - sum(lists[part][at] for part in parts))
            for at, (key, seconds) in enumerate(self.raw["steps"])
            if key == self.usual
        ]


@dataclass(frozen=True)
class Level:
    """One row of the diagnosis."""

    name: str
    touches: str
    share: float | None
    """Share of a step that it may touch; None if it is not known."""
    bound: float | None
    """The step's time over what must remain; None: no bound can be given."""
    reason: str
    expected: str = "-"
    result_class: str = "-"
    minutes: float = 0.0
    """Expected time of the attempt."""
    change: Mapping[str, str] | None = None
    """The change to try; None for advice."""
    line: str = ""
    """What a person would write."""


def diagnose(facts: Facts) -> list[Level]:
    """The levels of a program: those to try in their order, then advice."""
    levels = [
        *_generation_levels(facts), *_compile_levels(facts), *_optimizer_levels(facts),
        *_loss_levels(facts), *_layout_levels(facts), *_attention_levels(facts),
        *_memory_levels(facts), *_loader_levels(facts),
    ]  # fmt: skip
    levels.sort(key=lambda level: level.name == NOSTALL)  # it takes longest
    levels += _kernel_levels(facts)  # of the launches that compiled graphs leave
    if _graphs_first(facts):
        levels.sort(key=lambda level: level.name not in (STATIC, GRAPHS))
    return [level for level in levels if level.change] + [
        *(level for level in levels if not level.change),
        *_advice(facts),
    ]


def with_numerics(levels: Sequence[Level], facts: Facts) -> list[Level]:
    """``levels`` with those that change numbers to be tried after the others that are tried."""
    if not facts.raw["cuda"] or facts.raw["matmul_precision"] != "highest":
        return list(levels)
    level = Level(
        TF32, "matrix products", None, None, "no bound: shares of products are not measured",
        expected="not measured", result_class=CHANGES_NUMBERS, minutes=0.5,
        line='torch.set_float32_matmul_precision("high")',
        change={"name": TF32, "kind": "matmul_precision", "value": "high"},
    )  # fmt: skip
    tried = [found for found in levels if found.change]
    return [*tried, level, *(f for f in levels if not f.change and f.name != TF32)]


def certificate(facts: Facts, levels: list[Level]) -> str:
    """Why no level that can be tried gains 5 %; empty if one might, or if one has no bound."""
    tried = [level for level in levels if level.change]
    if any(level.bound is None for level in tried):
        return ""
    parts = {part for level in tried for part in _PARTS[level.change["kind"]]}  # type: ignore[index]
    joint = facts.bound(*sorted(parts))
    if len(facts.raw["steps"]) < MIN_STEPS or joint is None or joint >= NO_GAIN:
        return ""
    share = 1 - 1 / joint if facts.raw["cuda"] else facts.share(*sorted(parts))
    reason = f"all levels together gain at most {joint:.3f}: they touch {share:.1%} of a step"
    moving = {
        "waits for data: a faster input pipeline": facts.share("loader"),
        **_remaining(facts),
    }
    largest = max(moving, key=lambda name: moving[name])
    return f"{reason}; what would move it: {largest} ({moving[largest]:.0%} of a step)"


def _remaining(facts: Facts) -> Mapping[str, float]:
    """What no level touches, and its share of a step."""
    if not facts.raw["cuda"]:
        return {"the program's own code between the passes": facts.rest}
    products = "products, attention and communication: lower precision, or another batch size"
    return {products: facts.raw["trace"]["without_both"] / facts.step_seconds}


_PARTS = {
    "compile": ("forward", "backward"),
    "optimizer": ("optimizer",),
    "memory_format": ("forward", "backward", "optimizer"),
    "generation": ("forward",),
    "loss": ("backward",),
    "attention": ("forward", "backward"),
    "allocator": ("forward", "backward", "optimizer"),
    LOADER: ("loader",),
}
"""Parts of a step that a kind of change may touch."""


_WORDS = {"optimizer": "optimiser"}
"""Parts of a step as texts name them."""


def _level(facts: Facts, name: str, kind: str, value: str, **fields: Any) -> Level:
    parts, cuda = _PARTS[kind], facts.raw["cuda"]
    bound, words = facts.bound(*parts), " and ".join(_WORDS.get(part, part) for part in parts)
    share = 1 - 1 / bound if bound else None
    return Level(
        name=name,
        touches=words,
        share=share if cuda else facts.share(*parts),
        bound=bound,
        reason=(
            _device_reason(facts, parts) if cuda
            else f"no bound: {RANKS}" if facts.raw["world"] > 1
            else "no bound: nothing outside of it was seen" if bound is None
            else f"100% / {100 / bound:.3g}%: so much of a step or more is outside of {words} in "
            f"three of four steps (median {1 - facts.share(*parts):.1%})"
        ),
        change={"name": name, "kind": kind, "value": value},
        **fields,
    )  # fmt: skip


def _device_reason(facts: Facts, parts: Sequence[str]) -> str:
    """What of a step on a GPU a level can take away, or why that is not known."""
    if reason := facts.no_bound(*parts):
        return f"no bound: {reason}"
    trace, step = facts.raw["trace"], facts.step_seconds
    idle = f"idle {facts.idle:.0%}"
    work = []
    if "forward" in parts:
        work.append(f"pointwise work {trace['pointwise'] / step:.0%}")
        kinds: Mapping[str, float] = trace.get("movable", {})  # earlier recordings lack it
        work += [f"{kind} {seconds / step:.0%}" for kind, seconds in kinds.items()]
    if "optimizer" in parts:
        work.append(f"optimiser {trace['optimizer'] / step:.0%}")
    return f"the step without its device's {', '.join([idle, *work])}; all else keeps its time"


def _compile_levels(facts: Facts) -> list[Level]:
    roots, cuda = ", ".join(facts.raw["roots"]) or "module", facts.raw["cuda"]
    results = "within rounding, or other random numbers"
    graphs_first = _graphs_first(facts)
    # A module of PyTorch's own classes is not compiled by its method.
    line = "model = torch.compile(model{})" if facts.raw["in_torch"] else "model.compile({})"
    levels = [_level(
        facts, COMPILE, "compile", "inductor", minutes=0.5 if graphs_first else 1.5,
        result_class=results,
        expected=EVIDENCE if cuda else "not measured on CPUs", line=_written(line, "", roots),
    )]  # fmt: skip
    if cuda:
        several = facts.raw["calls"] > 1  # their gradients add up in the memory of graphs
        graphs = _level(
            facts, GRAPHS, "compile", MARKED if several else REDUCED,
            minutes=1.5 if graphs_first else 0.5, result_class=results,
            expected="1.15 to 2.87 on nine of ten programs, H200 (docs/results/optimize.md)",
            line=_written(line, f'mode="{REDUCED}"', f"{roots}; clone outputs that you keep"
                          f"{'; torch.compiler.cudagraph_mark_step_begin()' if several else ''}"),
        )  # fmt: skip
        levels.append(_unusable(graphs, reason) if (reason := _no_graphs(facts)) else graphs)
        levels.append(_level(
            facts, NOSTALL, "compile", "nostall", minutes=4.0, result_class=results,
            expected="1.05 (median of 24 steps), H200 (docs/results/fusion-unseen.md)",
            line=_written(line, 'backend="nostall"', roots),
        ))  # fmt: skip
    obstacle = facts.raw["obstacle"] or _kept_graph(facts)
    return [_unusable(level, obstacle) for level in levels] if obstacle else levels


def _kept_graph(facts: Facts) -> str:
    """Why the program's backward passes would fail in compiled code; empty if they would not."""
    kept = facts.raw.get("kept_graph")  # recordings of earlier versions lack it
    return f"a backward pass has {kept}, with which that of compiled code fails" if kept else ""


def _generation_levels(facts: Facts) -> list[Level]:
    """A cache of fixed size, with which transformers compiles the steps of its ``generate``."""
    if not facts.raw.get("generates"):  # recordings of earlier versions have no such key
        return []
    level = _level(
        facts, STATIC, "generation", "static", minutes=1.5,
        expected="2.08 and 2.73 on two models, H200 (docs/results/optimize.md)",
        result_class="within rounding",
        line='model.generation_config.cache_implementation = "static"',
    )  # fmt: skip
    return [_unusable(level, facts.raw["obstacle"]) if facts.raw["obstacle"] else level]


def _written(line: str, argument: str, remark: str) -> str:
    """The line with an argument of ``torch.compile``."""
    separator = ", " if argument and "torch.compile" in line else ""
    return f"{line.format(separator + argument)}  # {remark}"


def _graphs_first(facts: Facts) -> bool:
    """Whether CUDA graphs are tried before `torch.compile` alone.

    Where the idle time is not known, too: on an H200 they were the faster ones of seven programs.
    """
    return bool(facts.raw["cuda"]) and (facts.idle is None or facts.idle > MUCH_IDLE)


def _no_graphs(facts: Facts) -> str:
    """Why CUDA graphs cannot be used; empty if they can."""
    if facts.raw["world"] > 1:
        return "not tried with several ranks"
    if facts.idle is not None and facts.idle < MIN_IDLE:
        return f"the device is idle in only {facts.idle:.1%} of a step"
    calls = facts.raw["calls"]
    if facts.raw.get("keeps_gradients", calls > 1):  # recordings of earlier versions lack it
        return (
            "gradients live on in the next step (kept, or zero_grad(set_to_none=False)), and "
            "graphs use their memory again"
        )
    if calls > MOST_CALLS:
        return f"a step calls modules {calls} times with gradients; {MOST_CALLS} are tried at most"
    return ""


def _kernel_levels(facts: Facts) -> list[Level]:
    """The program's own Triton kernels, each with a search of what ptxas is given."""
    kernels = facts.raw.get("kernels") or ()
    if not kernels:
        return []
    names = list(dict.fromkeys(kernel["kernel"] for kernel in kernels))
    launches = sum(kernel["launches"] for kernel in kernels)
    searched = min(len(kernels), MAX_KERNELS)
    shown = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    level = Level(
        name=NATIVE,
        touches=f"{len(kernels)} Triton kernels, {launches:.3g} launches a step",
        share=None,
        bound=None,
        reason=f"no bound: the time of {shown} is measured when they are searched",
        expected="1.047 (17 unseen kernels alone), H200 (docs/results/assembler.md)",
        result_class="bit-equal",
        minutes=(SEARCH_SECONDS + KERNEL_SECONDS * searched) / 60,
        change={"name": NATIVE, "kind": "native", "value": "store"},
        line=f"@nostall.optimize  # above @triton.jit of {', '.join(names[:MAX_KERNELS])}",
    )
    if facts.raw["world"] > 1:
        return [_unusable(level, "not tried with several ranks: the others would wait")]
    return [level]


def _layout_levels(facts: Facts) -> list[Level]:
    """Another memory format, for modules with convolutions of images."""
    if not facts.raw["images"]:
        return []
    level = _level(
        facts, "channels_last", "memory_format", "channels_last", minutes=0.3,
        expected="not measured", result_class="within rounding",
        line="model = model.to(memory_format=torch.channels_last)",
    )  # fmt: skip
    return [_unusable(level, facts.raw["obstacle"]) if facts.raw["obstacle"] else level]


def _loss_levels(facts: Facts) -> list[Level]:
    """A loss of large logits that no module computes."""
    if not (elements := facts.raw.get("loss_elements")):
        return []
    level = _level(
        facts, LOSS, "loss", "inductor", expected="not measured", result_class="within rounding",
        minutes=0.4, line="functional.cross_entropy = torch.compile(functional.cross_entropy)",
    )  # fmt: skip
    touches = f"the loss of {elements / 1e6:.3g} million logits, outside of the modules"
    level = replace(level, touches=touches, share=None, bound=None, reason="no bound is known")
    return [_unusable(level, reason) if (reason := _kept_graph(facts)) else level]


def _attention_levels(facts: Facts) -> list[Level]:
    """Another back end of PyTorch's attention, where two can compute the program's calls."""
    attention = facts.raw.get("attention") or {"calls": 0}  # recordings of earlier versions lack it
    if not attention["calls"]:
        return []
    value = "flash" if attention["first"] == "CUDNN_ATTENTION" else "cudnn"
    name = {"cudnn": "cuDNN", "flash": "flash"}[value] + " attention"
    level = _level(
        facts, name, "attention", value, minutes=0.3, expected="not measured",
        result_class="within rounding",
        line=f"with sdpa_kernel([SDPBackend.{value.upper()}_ATTENTION, ...], set_priority=True): "
        "train()  # of torch.nn.attention",
    )  # fmt: skip
    # A bound of a change of products is not known: they are what a trace says must remain.
    level = replace(level, touches="attention", share=None, bound=None, reason="no bound is known")
    if not attention["half"]:
        return [_unusable(level, "attention in float32, which neither flash nor cuDNN computes")]
    if attention["masked"] and value == "flash":
        return [_unusable(level, "its calls have masks, which flash attention lacks")]
    return [level]


def _memory_levels(facts: Facts) -> list[Level]:
    """Memory in segments that grow, where the allocator asks the driver during steps."""
    if not facts.raw["cuda"] or "driver_calls" not in facts.raw:  # of earlier versions
        return []
    count = facts.raw["driver_calls"]
    level = Level(
        SEGMENTS, f"{count} calls of the driver for memory", None, None, "no bound is known",
        expected="not measured", result_class="bit-equal", minutes=0.3,
        change={"name": SEGMENTS, "kind": "allocator", "value": "expandable_segments"},
        line="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # in the environment",
    )  # fmt: skip
    if reason := facts.raw["not_expandable"]:
        return [_unusable(level, reason)]
    if not count:
        return [_unusable(level, "its watched steps take all memory from PyTorch's cache")]
    return [level]


def _loader_levels(facts: Facts) -> list[Level]:
    """Workers for a loader that has none and takes much of a step."""
    loader, share = facts.raw["loader"], facts.share("loader")
    # Recordings of earlier versions do not tell the kind of a data set.
    if share < MUCH_LOADING or loader.get("workers", 1) or loader.get("iterable", True):
        return []
    if (world := facts.raw["world"]) > 1:
        reason = f"not tried with {world} ranks"
        return [Level("loader workers", "loader", share, None, reason)]
    cuda, processors = facts.raw["cuda"], facts.raw.get("processors", 1)
    workers = max(2, min(MOST_WORKERS, processors // 2))
    pinned = ", pin_memory=True" if cuda else ""
    level = _level(
        facts, "loader workers", LOADER, f"workers={workers}" + (",pinned" if cuda else ""),
        expected="not measured", result_class="bit-equal, or other random numbers", minutes=2.0,
        line=f"DataLoader(..., num_workers={workers}{pinned})"
        + ("  # and batch.to(device, non_blocking=True)" if cuda else ""),
    )  # fmt: skip
    if cuda:  # which works while the host reads
        level = replace(level, share=share, bound=None, reason="no bound: the GPU works meanwhile")
    return [level]


def _optimizer_levels(facts: Facts) -> list[Level]:
    names = ", ".join(sorted(set(facts.raw["optimizers"]))) or "no optimiser"
    classes = {"fused": "within rounding", "foreach": "bit-equal", "captured": "within rounding"}
    lines = {"captured": "with torch.cuda.graph(graph): optimizer.step()  # then graph.replay()"}
    levels = [
        _level(
            facts, f"{flag} optimiser", "optimizer", flag, minutes=0.3,
            expected=CAPTURED_GAIN if flag == "captured" else "not measured",
            result_class=classes[flag], line=lines.get(flag, f"{names}(..., {flag}=True)"),
        )
        for flag in facts.raw["flags"] or ["fused"]
    ]  # fmt: skip
    if facts.raw["flags"]:
        return levels
    reason = f"{names}: set already, or no optimiser that can be switched"
    return [_unusable(level, reason) for level in levels]


def _unusable(level: Level, reason: str) -> Level:
    return replace(level, bound=None, reason=reason, expected="-", minutes=0.0, change=None)


def _advice(facts: Facts) -> list[Level]:
    """What nostall does not try in this version."""
    advice = []
    if (share := facts.share("loader")) > 0.02 and not _loader_levels(facts):
        loader = facts.raw["loader"]
        have = f"num_workers={loader.get('workers', 0)}, pin_memory={loader.get('pinned', False)}"
        more = "more workers, or less work a sample" if loader.get("workers") else "num_workers=2"
        bound, reason = facts.bound("loader"), f"advice: {have}: {more}"
        advice.append(Level("input pipeline", "loader", share, bound, reason))
    if (share := facts.rest) > 0.1 and not facts.raw["cuda"]:
        reason = "advice: outside forward, backward, optimiser and loader; a profiler shows it"
        advice.append(Level("own code", "between the passes", share, None, reason))
    if facts.raw["cuda"]:
        reason = "advice: it changes numbers: torch.set_float32_matmul_precision('high')"
        advice.append(Level("TF32", "matrix products", None, None, reason))
    if (world := facts.raw["world"]) > 1:
        reason = "advice: `nostall characterize` of a trace shows what is exposed"
        advice.append(Level("communication", f"{world} ranks", None, None, reason))
    return advice


def bounds_at(facts: Facts, seconds: float) -> dict[str, Level]:
    """The levels that can be tried, by name, where a step of the original takes ``seconds``.

    A host that runs faster than in the watch reads its data faster, too.
    """
    raw = facts.raw
    speed = min(1.0, seconds / raw["mean_seconds"])
    parts = {**raw["parts"], "loader": [speed * part for part in raw["parts"]["loader"]]}
    found = diagnose(Facts({**raw, "mean_seconds": seconds, "parts": parts}))
    return {level.name: level for level in found if level.change}


def bound_over(gain: float, bound: float | None) -> float | None:
    """The bound of a change beside a program that others made ``gain`` times as fast.

    The change takes away the same seconds, which are a larger share of a shorter step.  None if
    nothing would be left.
    """
    left = 0.0 if bound is None else 1 - gain * (1 - 1 / bound)
    return 1 / left if left > 0 else None


def with_bound(level: Level, found: Level | None) -> Level:
    """The level with share, bound and reason of ``found``."""
    if found is None or not level.change or level.bound is not None:
        return level
    return replace(level, share=found.share, bound=found.bound, reason=found.reason)


def as_planned(levels: Sequence[Level], plan: Mapping[str, float]) -> list[Level]:
    """The levels of ``plan``, in its order and with its minutes: another version tried these."""
    known = {level.name: level for level in levels}
    return [replace(known[n], minutes=minutes) for n, minutes in plan.items() if n in known]
