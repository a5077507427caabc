"""Where a tuning job measures: nowhere, on the first GPU, or on the workers of a farm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nostall import farm
from nostall.core import BadInput, Search
from nostall.gpu import Device, Kernel, LocalGpu
from nostall.tuning.farm_search import Chains
from nostall.tuning.job import Settings
from nostall.tuning.source import Source
from nostall.tuning.strategies import strategy


@contextmanager
def measuring(
    source: Source, settings: Settings, scheduler: str | None, logs: Path | None = None
) -> Iterator[tuple[Search, Device | None]]:
    """The search and the device that ``settings`` ask for; no device for a modelled objective.

    ``logs`` is where a strategy that learns leaves its curves.
    """
    search = strategy(settings.strategy, logs=logs, policy=settings.policy)
    if settings.objective != "gpu":
        yield search, None
        return
    if source.launch is None:
        raise BadInput(
            f"{source.origin}: measuring needs to know how {source.kernel!r} is launched; give "
            "--launch spec.toml (grid, block, shared, args)"
        )
    kernel, workers = Kernel(source.cubin, source.kernel, source.launch), settings.workers
    if scheduler is None and (workers is None or workers == 1):
        with LocalGpu(kernel, settings.plan) as gpu:
            yield search, gpu
        return
    opening = farm.DeviceSpec(kernel, settings.plan)
    with farm.remote(scheduler, workers) if scheduler else farm.local(workers or 1) as works:
        try:
            yield Chains(search, works, opening), farm.FarmDevice(works, opening)
        finally:
            works.run_on_all(farm.close_device, opening)
