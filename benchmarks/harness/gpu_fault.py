"""End of a process whose GPU context is lost, so that its pool starts a new one."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

EXIT_CODE = 70


@contextmanager
def end_process_after_fault() -> Iterator[None]:
    """Pass errors on, but end the process with :data:`EXIT_CODE` if the GPU no longer answers."""
    try:
        yield
    except RuntimeError:
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except RuntimeError:
            traceback.print_exc()
            os._exit(EXIT_CODE)
        raise
