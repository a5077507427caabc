"""Isolation from libraries that seed the global random generators and use all threads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def isolated_random_state() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and PyTorch at the end of the context.

    Inside, PyTorch has one thread. Sums over several threads differ between machines, and then the
    same seed gives another search.
    """
    python, numpy, threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads(threads)
