"""Set up a search: create the strategy, and open the GPU or the farm that measures candidates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nostall.core import Search
from nostall.gpu import Device, Kernel, LocalGpu
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source, missing_launch
from nostall.tuning.strategies import make_strategy


@contextmanager
def open_search(
    source: Source, settings: Settings, scheduler: str | None, logs: Path | None = None
) -> Iterator[tuple[Search, Device | None]]:
    """Open the search and the device for ``settings``; no device for a modelled objective.

    ``scheduler`` is the address of a Dask scheduler; without one and without several workers, the
    first GPU of this machine measures.  ``logs`` is the folder for the curves of a learning
    strategy.
    """
    search = make_strategy(settings.strategy, logs=logs, policy=settings.policy)
    if settings.objective != "gpu":
        yield search, None
        return
    if source.launch is None:
        raise missing_launch(source, "measuring")
    kernel, workers = Kernel(source.cubin, source.kernel, source.launch), settings.workers
    if scheduler is None and (workers is None or workers == 1):
        with LocalGpu(kernel, settings.measurement_plan) as gpu:
            yield search, gpu
        return
    from nostall import farm
    from nostall.tuning.farm_search import ParallelChains

    spec = farm.DeviceSpec(kernel, settings.measurement_plan)
    with farm.remote(scheduler, workers) if scheduler else farm.local(workers or 1) as pool:
        try:
            yield ParallelChains(search, pool, spec), farm.FarmDevice(pool, spec)
        finally:
            pool.run_on_all(farm.close_device, spec)
