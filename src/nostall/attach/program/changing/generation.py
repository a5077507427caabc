"""A static cache of keys and values for ``generate`` of transformers, which then compiles decoding.

The change is checked by generating with a copy: the logits of each step are compared as far as the
tokens before it are equal, because greedy generation may choose another token among equals.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nostall.attach.program.distances import SMALL, SUMMED
from nostall.attach.program.roots import Switch
from nostall.attach.program.shadow import (
    CLASSES,
    MOVED,
    Finding,
    Generators,
    clone,
    line_of,
    map_tensors,
    raise_version_limit,
)

STATIC = "static"
"""The value of ``cache_implementation``."""
WARM = 2
"""Calls before those that are compared: CUDA graphs are recorded in them."""


def generated(root: Any) -> int:
    """Number of the calls of ``generate`` of ``root`` among what a check gets; modules have others.

    It is below 0.
    """
    return -1 - id(root)


class GenerateCall(NamedTuple):
    """A call of ``generate`` of a model."""

    function: Callable[..., Any]
    """``GenerationMixin.generate`` without nostall."""
    args: Any
    kwargs: Any


class StaticCache:
    """``generation_config.cache_implementation = "static"`` of the models that generate.

    Calls of ``generate`` of a kind that is not compared run as they were: with a cache or an
    assistant of the program, transformers would refuse them.
    """

    def __init__(self, switches: Sequence[Switch], value: str) -> None:
        self.value = value
        self.roots = [switch.root for switch in switches if can_be_static(switch.root)]
        self._before = [root.generation_config.cache_implementation for root in self.roots]
        self._kept: list[dict[str, Any]] = [{} for _ in self.roots]
        """What transformers keeps in each model for the static cache, while it is off."""
        self._patched: tuple[Any, Any, Any] | None = None
        """A class, its ``generate``, and the one in its place while the change is on."""

    def missing(self) -> str:
        """Why nothing would be changed; empty if something would."""
        return "" if self.roots else "no model generates with its usual cache"

    def check(self, calls: Mapping[int, Sequence[Any]]) -> Finding:
        worst = Finding(CLASSES[0], self.missing())
        raise_version_limit()
        for root in self.roots:
            finding = check_generation(root, calls.get(generated(root), ()), self.value)
            if finding.refusal:
                return finding._replace(refusal=f"{type(root).__name__}: {finding.refusal}")
            worst = max(worst, finding, key=Finding.rank)
        return worst

    def on(self) -> None:
        if self._patched is None and self.roots:
            raise_version_limit()
            for root, kept in zip(self.roots, self._kept, strict=True):
                root.generation_config.cache_implementation = self.value
                root.__dict__.update(kept)
            self._guard()

    def off(self) -> None:
        if self._patched is None:
            return
        owner, generate, guarded = self._patched
        if owner.__dict__.get("generate") is guarded:
            owner.generate = generate
        self._patched = None
        for root, kept, before in zip(self.roots, self._kept, self._before, strict=True):
            root.generation_config.cache_implementation = before
            kept.update({name: root.__dict__.pop(name) for name in _OWN if name in root.__dict__})

    def _guard(self) -> None:
        """Keep the program's own setting in calls of a kind that is not checked."""
        owner = next(c for c in _classes(self.roots) if "generate" in c.__dict__)
        generate = owner.generate

        @functools.wraps(generate)
        def guarded(model: Any, *args: Any, **kwargs: Any) -> Any:
            at = next((n for n, root in enumerate(self.roots) if root is model), None)
            if at is None or not not_compared(model, GenerateCall(generate, args, kwargs)):
                return generate(model, *args, **kwargs)
            config = model.generation_config
            config.cache_implementation = self._before[at]
            try:
                return generate(model, *args, **kwargs)
            finally:
                config.cache_implementation = self.value

        owner.generate = guarded
        self._patched = owner, generate, guarded


_OWN = ("_cache", "_compiled_call", "_last_compile_config", "_previous_max_cache_length")
"""What versions of transformers keep in a model for its static cache."""


def _classes(roots: Sequence[Any]) -> list[Any]:
    """Classes of the models, bases first: that of transformers is the first with ``generate``."""
    return [c for root in roots for c in reversed(type(root).__mro__)]


def can_be_static(root: Any) -> bool:
    """Whether a model of transformers generates with the cache that grows with each token."""
    config = getattr(root, "generation_config", None)
    return (
        config is not None
        and getattr(config, "cache_implementation", "") in (None, "dynamic")
        and callable(getattr(root, "generate", None))
    )


def check_generation(root: Any, calls: Sequence[GenerateCall], value: str) -> Finding:
    """Generate with a copy of ``root`` with and without the static cache."""
    if not calls:
        return Finding(CLASSES[0], "no call of generate was seen that a copy could repeat")
    try:
        return _Copy(root, value).check(calls[0])
    except Exception as error:  # any error of transformers or the compiler
        return Finding(CLASSES[0], f"a changed copy fails, so nothing is proven: {line_of(error)}")
    finally:
        gc.collect()  # a copy and its versions refer to each other, and fill the GPU's memory


class _Copy:
    """A copy of a model, and runs of it from the same parameters."""

    def __init__(self, root: Any, value: str) -> None:
        self.torch, self.value = sys.modules["torch"], value
        self.model = copy.deepcopy(root)
        for name in _OWN:  # a compiled call in it would be of ``root``
            self.model.__dict__.pop(name, None)
        self.state = [(p, p.detach().clone()) for p in self.model.parameters()]

    def check(self, call: GenerateCall) -> Finding:
        if reason := not_compared(self.model, call):
            return Finding(CLASSES[0], reason)
        for _ in range(WARM):
            self.run(call, self.value)
        worst = 0.0
        for each in (call, _reversed(call)):
            changed, original = self.run(each, self.value), self.run(each, None)
            if changed[0].shape != original[0].shape or changed[0].dtype != original[0].dtype:
                return Finding(CLASSES[0], "the tokens have another shape than the original's")
            moved = [self.run(each, None, self._rounding(), n + 1) for n in range(MOVED)]
            distance, size = _distance(original, changed)
            band = max(_distance(original, other)[0] for other in moved)
            eps = self._rounding()
            allowed = 2 * band + (SUMMED * eps if eps < SMALL else 4 * eps) * size
            if not distance <= allowed:  # NaN, too
                off, moves = distance / (size or 1), band / (size or 1)
                reason = (
                    f"logits are off by {off:.1e} of their size; one rounding of parameters moves "
                    f"them by {moves:.1e}"
                )
                return Finding(CLASSES[3], reason)
            worst = max(worst, distance / (allowed or 1.0))
        return Finding(CLASSES[1], detail=f"logits at most {worst:.2f} of the allowed distance")

    def _rounding(self) -> float:
        torch = self.torch
        floats = [p for p, _ in self.state if p.is_floating_point()]
        return max((float(torch.finfo(p.dtype).eps) for p in floats), default=SMALL)

    def run(
        self, call: GenerateCall, cache: str | None, moved: float = 0.0, number: int = 0
    ) -> tuple[Any, Any]:
        """Tokens and the logits of each step; ``moved``: parameters by one rounding."""
        torch, moving = self.torch, Generators(1000 + number)
        with torch.no_grad():
            for parameter, value in self.state:
                parameter.copy_(moving.moved(value, moved))
        args, kwargs = clone((call.args, call.kwargs))
        kwargs.pop("streamer", None)  # it would show the tokens to the program
        own = named(call.function, self.model, args, kwargs).get("generation_config")
        for config in (self.model.generation_config, own):
            if config is not None:
                config.cache_implementation = cache
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(7)
            kwargs.update(return_dict_in_generate=True, output_logits=True)
            result = call.function(self.model, *args, **kwargs)
        return result.sequences.clone(), [logits.detach().clone() for logits in result.logits]


_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (False, None), "num_beams": (1, None), "return_dict_in_generate": (False, None),
    "assistant_model": (None,), "assistant_early_exit": (None,), "custom_generate": (None,),
    "prompt_lookup_num_tokens": (None,), "use_cache": (True, None),
}  # fmt: skip
"""Options of ``generate`` and their values with which tokens are a function of logits."""


def not_compared(model: Any, call: GenerateCall) -> str:
    """Why logits of calls like this one of ``model`` cannot be compared; empty if they can."""
    given = named(call.function, model, call.args, call.kwargs)
    configs = (given.get("generation_config"), model.generation_config)
    for name, plain in _PLAIN.items():
        values = (given.get(name), *(getattr(config, name, None) for config in configs))
        value = next((value for value in values if value is not None), None)
        if value not in plain:
            shown = value if isinstance(value, bool | int | str) else f"a {type(value).__name__}"
            return f"only greedy generation of tokens is compared, and {name} is {shown}"
    if any(given.get(name) is not None for name in ("past_key_values", "cache_params")):
        return "the program has a cache of its own"
    return ""


def named(function: Any, model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name; those of ``function`` can be given by position."""
    try:
        bound = inspect.signature(function).bind(model, *args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or a call that it refuses itself
        return dict(kwargs)
    return {**bound, **kwargs}


def _reversed(call: GenerateCall) -> GenerateCall:
    """The call with its sequences in another order: a cached result is then wrong."""

    def reverse(tensor: Any) -> Any:
        return tensor.detach().flip(0) if tensor.dim() else tensor

    args, kwargs = map_tensors((call.args, call.kwargs), reverse)
    return call._replace(args=args, kwargs=kwargs)


def _distance(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[float, float]:
    """Root mean square of the difference of logits where all tokens before are equal; their size.

    ``one`` and ``other``: tokens, and a list of logits by step.
    """
    torch = sys.modules["torch"]
    first = one[0].shape[1] - len(one[1])
    same = torch.ones(one[0].shape[0], dtype=torch.bool, device=one[0].device)
    difference = size = count = 0.0
    for at, (a, b) in enumerate(zip(one[1], other[1], strict=True)):
        if at:
            same = same & (one[0][:, first + at - 1] == other[0][:, first + at - 1])
        a, b = a[same].double(), b[same].double()
        difference += float((a - b).square().sum())
        size, count = size + float(a.square().sum()), count + a.numel()
    return (difference / (count or 1)) ** 0.5, (size / (count or 1)) ** 0.5
