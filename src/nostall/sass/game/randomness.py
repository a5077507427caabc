"""Libraries that seed the whole process and use all of it, kept to themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def kept_apart() -> Iterator[None]:
    """Give Python's, NumPy's and PyTorch's global generators back as they were.

    Inside, PyTorch has one thread: sums over several come out differently on another machine, and
    then the same seed is another search.
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
