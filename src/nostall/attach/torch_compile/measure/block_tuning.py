"""Search block sizes of Inductor's generated kernels within a limit of time.

With its options ``max_autotune_pointwise`` and ``coordinate_descent_tuning`` Inductor measures
configurations of a kernel when it first runs, and compiles most of them one after the other in the
user's process, for seconds each kernel.  Here a step runs twice: first each kernel takes the best
of its listed configurations, and is timed; then the search goes on from there, for each kernel as
long as its share of the step is worth.  Inductor stores what was found in its own cache, so later
processes search nothing.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor

LEAST_SHARE = 0.03
"""No configurations are searched for a kernel with a smaller share of the time of all kernels."""
NOT_SEARCHED = ("TEMPLATE", "USER_AUTOTUNE", "FIXED")
"""Kinds of kernels whose configurations Inductor does not search, either."""
NEAR_COPY = 0.92
"""No configurations are searched for a kernel that moves its tensors at so much of the bandwidth of
a large copy: no other one gains much."""


@dataclass
class _Kernel:
    """One of Inductor's kernels that searches a configuration."""

    tuner: Any
    # Milliseconds of one run; 0 if there was no time to measure it.
    milliseconds: float = 0.0
    runs: int = 0
    # Whether it takes hardly longer than a copy of its tensors.
    is_near_copy: bool = False

    @property
    def weight(self) -> float:
        return self.milliseconds * self.runs


class BlockTuning:
    """The search of one compiled graph's block sizes."""

    def __init__(self, seconds: float, copy_bytes_per_second: float) -> None:
        """``seconds``: approximate limit of the time for all kernels.

        ``copy_bytes_per_second``: bandwidth of a large copy, bytes read plus bytes written.
        """
        self._copy_bytes_per_second = copy_bytes_per_second
        self._limit, self._began = seconds, time.perf_counter()
        self._kernels: dict[int, _Kernel] = {}
        self._tried = self._searched = 0

    def run(self, step: Callable[[], object]) -> str:
        """Run a step twice, and search; returns what was done, as text.

        ``step`` runs the compiled graph, forward and backward.  Kernels in Inductor's cache are not
        searched again.
        """
        with self._patched(self._list_only, self._time):
            step()
        for kernel in self._kernels.values():
            _forget_launcher(kernel.tuner)
        with self._patched(self._list_only, self._search):
            step()
        spent = time.perf_counter() - self._began
        return (
            f"{self._searched} of {len(self._kernels)} kernels searched, {self._tried} "
            f"configurations in {spent:.1f} s (limit {self._limit:g} s)"
        )

    @property
    def _left(self) -> float:
        return self._limit - (time.perf_counter() - self._began)

    @contextlib.contextmanager
    def _patched(self, choose: Any, descend: Any) -> Iterator[None]:
        """Inductor's class with these methods for lists of configurations and for the search."""
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        choose_all, descend_all = (
            CachingAutotuner.autotune_to_one_config,
            CachingAutotuner.coordinate_descent_tuning,
        )
        run_all = CachingAutotuner.run

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            kernel = self._kernels.get(id(tuner))
            if kernel is not None:
                kernel.runs += 1
                _forget_launcher(tuner)
            return run_all(tuner, *args, **kwargs)

        def autotune(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            return choose(choose_all, tuner, *args, **kwargs)

        def descent(tuner: Any, launcher: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(tuner.heuristic_type, "name", "") in NOT_SEARCHED:
                return descend_all(tuner, launcher, *args, **kwargs)
            return descend(descend_all, tuner, launcher, *args, **kwargs)

        with (
            mock.patch.object(CachingAutotuner, "run", run),
            mock.patch.object(CachingAutotuner, "autotune_to_one_config", autotune),
            mock.patch.object(CachingAutotuner, "coordinate_descent_tuning", descent),
        ):
            yield

    def _list_only(self, choose_all: Any, tuner: Any, *args: Any, **kwargs: Any) -> None:
        """Time the configurations that Inductor lists for a kernel, and keep the fastest."""
        self._tried += len(tuner.launchers)
        choose_all(tuner, *args, **kwargs)

    def _time(self, _: Any, tuner: Any, launcher: Any, *args: Any, **kwargs: Any) -> Any:
        """Time the kernel, and leave it as it is."""
        if id(tuner) not in self._kernels:
            found = self._kernels[id(tuner)] = _Kernel(tuner, runs=1)
            if self._left > 0:
                found.milliseconds = float(tuner.bench(launcher, *args, **kwargs))
                copied = 1e-3 * found.milliseconds * self._copy_bytes_per_second
                found.is_near_copy = _bytes((*args, *kwargs.values())) > NEAR_COPY * copied
        return launcher

    def _search(self, search: Any, tuner: Any, launcher: Any, *args: Any, **kwargs: Any) -> Any:
        """Search around the kernel's configuration for its share of the time that is left."""
        kernel = self._kernels.get(id(tuner))
        share, left = 0.0, self._left
        if kernel is not None and left > 0:
            least = LEAST_SHARE * sum(each.weight for each in self._kernels.values())
            worth = [x for x in self._kernels.values() if x.weight > least and not x.is_near_copy]
            rest = sum(each.weight for each in worth if not _is_found(each.tuner))
            share = kernel.weight / rest if kernel in worth else 0.0
        if share == 0.0:
            return _settle(tuner, launcher)
        self._searched += 1
        end = time.perf_counter() + share * left
        explore = tuner.coordesc_tuner.autotune

        def limited(measure: Callable[[Any], float], *rest: Any, **options: Any) -> Any:
            def until_end(config: Any) -> float:
                if time.perf_counter() > end:
                    return math.inf
                self._tried += 1
                return measure(config)

            return explore(until_end, *rest, **options)

        with mock.patch.object(tuner.coordesc_tuner, "autotune", limited):
            return search(tuner, launcher, *args, **kwargs)


def _bytes(values: Sequence[object]) -> int:
    """Bytes of tensors, as if a kernel moved each of them once and completely."""
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, Tensor))


def _is_found(tuner: Any) -> bool:
    return bool(tuner.launchers and getattr(tuner.launchers[0].config, "found_by_coordesc", False))


def _settle(tuner: Any, launcher: Any) -> Any:
    """Make the kernel's configuration final, in Inductor's cache, too."""
    launcher.config.found_by_coordesc = True
    if tuner.save_cache_hook:
        tuner.save_cache_hook(launcher.config, 0, found_by_coordesc=True)
    return launcher


def _forget_launcher(tuner: Any) -> None:
    """PyTorch 2.13 skips all tuning of a kernel that has run once."""
    if getattr(tuner, "_cached_launcher", None) is not None:
        tuner._cached_launcher = None
