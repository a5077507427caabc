"""The levels of nostall: what a user has, and what to begin with.

The help page, README and the documentation's start page share this list.
"""

from __future__ import annotations

from typing import NamedTuple


class Level(NamedTuple):
    """A level, in the order of the help page."""

    title: str
    """Panel of the help page."""
    have: str
    """What a user has who begins here."""
    begin: str
    """One line to begin with."""
    verbs: tuple[str, ...]
    """Commands, the one of daily use first."""
    page: str
    """Page to read first, below ``docs``."""


LEVELS = (
    Level(
        "Whole programs", "a slow training program", "nostall optimize -- python train.py",
        ("optimize",), "how-to/optimize-a-program.md",
    ),
    Level(
        "PyTorch models", "a PyTorch model", 'torch.compile(model, backend="nostall")',
        ("fuse",), "tutorials/first-torch-compile.md",
    ),
    Level(
        "Traces and job tables", "a profiler trace, or a job table",
        "nostall characterize trace.json.gz", ("characterize",), "tutorials/first-trace.md",
    ),
    Level(
        "Kernels", "a Triton or CUDA kernel", "nostall tune kernels.py:kernel --objective gpu",
        ("tune", "bench", "verify", "inspect", "regress", "init", "record", "train"),
        "tutorials/first-kernel.md",
    ),
    Level(
        "Serving", "vLLM", "vllm serve MODEL --attention-backend CUSTOM", ("serving",),
        "how-to/serve-with-vllm.md",
    ),
    Level(
        "Several GPUs", "several GPUs", "nostall plan model.py:build --cluster cluster.toml",
        ("plan", "simulate", "launch"), "tutorials/first-pipeline.md",
    ),
    Level(
        "Results", "results of nostall", "nostall apply python train.py",
        ("apply", "store", "report", "runs"), "how-to/use-results.md",
    ),
    Level("This machine", "a new machine", "nostall doctor", ("doctor",), "how-to/install.md"),
)  # fmt: skip
