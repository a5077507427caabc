"""The step of ``triton_program.py``, and a search whose result is made up."""

# ruff: noqa: N803
from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import triton.language as tl

last = None


def axpy(y, x, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offs, offs < n, 0.0)
    tl.store(y + offs, value * 2.0 + tl.load(y + offs, offs < n, 0.0), offs < n)


def step(kernel, tensor):
    global last
    last = kernel[(4,)](tensor, tensor[16:], 2048, BLOCK=512)


def store_variant(source, seconds, ordinal):
    """Stores another legal order as if it was measured."""
    from nostall.store import Store
    from tests.unit.attach.variants import keep_variant

    assert seconds > 0 and source.ptx is not None and source.launch.grid == (4, 1, 1)
    row = keep_variant(Store(), source.cubin)
    Path(os.environ["FASTER"]).write_text(row.optimised)
    return {"reason": "", "seconds": 2e-2}


def store_useless(source, seconds, ordinal):
    """Stores another legal order that is not faster in the program."""
    from nostall.store import Store
    from tests.unit.attach.variants import keep_variant

    keep_variant(Store(), source.cubin)
    return {"reason": "", "seconds": 2e-2}


def interrupt(source, seconds, ordinal):
    """Stores a variant, and Ctrl-C comes before it was tried in the program."""
    keep = store_variant(source, seconds, ordinal)
    os.kill(json.loads(os.environ["NOSTALL_PROGRAM"])["director"], signal.SIGINT)
    return keep


def kill(source, seconds, ordinal):
    """Stores a variant, and `nostall optimize` is killed before it was tried in the program."""
    keep = store_variant(source, seconds, ordinal)
    os.kill(json.loads(os.environ["NOSTALL_PROGRAM"])["director"], signal.SIGKILL)
    return keep


def hang(source, seconds, ordinal):
    """Ctrl-C, and the search has stored a variant and does not end."""
    interrupt(source, seconds, ordinal)
    time.sleep(100.0)


def find_nothing(source, seconds, ordinal):
    """No gain."""
    return {"reason": "no gain beyond the noise", "seconds": 2e-2}
