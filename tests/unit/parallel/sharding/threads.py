"""Ranks as threads of this process, with PyTorch's process group for tests of DTensor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as pg


def run_on_threads(ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """Results of ``function(rank)`` on each rank; raises the first error of a rank."""
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []
    if not hasattr(pg.ThreadLocalWorld, "comms"):  # PyTorch 2.11: groups end with an error
        pg.ThreadLocalWorld.comms = []
    pg._install_threaded_pg()
    isolate(True)
    store = dist.HashStore()

    def run(rank: int) -> None:
        dist.init_process_group(backend="threaded", rank=rank, world_size=ranks, store=store)
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
            pg.ProcessLocalGroup.exception_handle(error)  # releases the threads that wait
        finally:
            dist.destroy_process_group()

    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        isolate(False)
        pg.ProcessLocalGroup.reset()
        pg._uninstall_threaded_pg()
    if errors:
        raise errors[0]
    return results
