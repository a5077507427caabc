"""Methods and parts of ``benchmarks.torch_compile.models``, and the settings of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.torch_compile.model_zoo.parts import models
from benchmarks.torch_compile.model_zoo.user_models import user_models, vocabulary_models

AUTOTUNE, GRAPHS = "max-autotune-no-cudagraphs", "reduce-overhead"
STITCHED_ALWAYS = {"nostall.choose": "stitched"}


@dataclass(frozen=True)
class Method:
    """How a model runs: ``backend`` of torch.compile or ``eager``, mode, and nostall's options."""

    backend: str
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


METHODS = {
    "eager": Method("eager"),
    "compile": Method("inductor"),
    "nostall": Method("nostall"),
    "always": Method("nostall", None, STITCHED_ALWAYS),
    "compile, autotuned": Method("inductor", AUTOTUNE),
    "nostall, autotuned": Method("nostall", AUTOTUNE),
    "compile, graphs": Method("inductor", GRAPHS),
    "nostall, graphs": Method("nostall", GRAPHS),
    "untouched, graphs": Method("nostall", GRAPHS, {"nostall.choose": "inductor"}),
    "compile, again": Method("inductor"),
    "compile, autotuned, again": Method("inductor", AUTOTUNE),
    "compile, graphs, again": Method("inductor", GRAPHS),
}
INTERLEAVED = {
    "steady": ("compile", "nostall", "always", "eager"),
    "gain": ("compile", "nostall", "compile, again"),
    "autotuned": ("compile, autotuned", "nostall, autotuned", "compile, autotuned, again"),
    "graphs": (
        *("compile, graphs", "nostall, graphs"),
        *("untouched, graphs", "compile, graphs, again"),
    ),
}
"""Methods that are timed interleaved, by part; all are compared with the first."""
REPLAYED = ("steady", "gain")
"""Parts that also time whole steps as CUDA graphs."""
ZOOS = {"parts": models, "users": user_models, "vocabulary": vocabulary_models}
"""Sets of models: parts of published models, whole models as users write them, and those with
large vocabularies."""
PROCESS_COUNTS = {"graphs": 4}
"""Number of processes of a part (default 1).

Each makes the copies of the model in another order, because equal copies are not equally fast.
"""
STARTS = {"inductor": "compile", "nostall": "nostall"}
"""Parts that measure the start of a program, with their method."""
PAIRED, AGAIN = "first", "again"
"""Parts that start programs of several methods alternately, one process for each start.

PAIRED has empty caches; AGAIN has the caches that the parts in ``STARTS`` have filled.
"""
START_METHODS = {PAIRED: STARTS, AGAIN: {**STARTS, "always": "always"}}
"""Methods of these parts; with warm caches also the stitched version, even if it was not chosen."""


@dataclass(frozen=True)
class Setup:
    """Settings of one process."""

    model: str
    part: str
    out: str
    state: str = "cold"
    """State of the caches; in paired parts the method to start."""
    device: str = "cuda"
    dtype: str = "bfloat16"
    small: bool = False
    seconds: float = 200.0
    """Time limit of the process."""
    measured_s: float = 4.0
    """Seconds for each set of samples."""
    recorded: bool = True
    """Whether a paired start is recorded; otherwise it only reads files into memory."""
    pairs: int = 2
    """Number of pairs of first steps in all."""
    zoo: str = "parts"
    """The set that has the model (:data:`ZOOS`)."""
    turn: int = 0
    """Number of the process of a part in :data:`ROUNDS`; rotates the order of the copies."""
