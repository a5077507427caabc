"""Engines of vLLM that start at once on one GPU, and end together."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from nostall.attach.rollouts.engine import Engine
from nostall.attach.rollouts.workload import LONGEST

CHILD = "nostall.attach.rollouts.child"
"""Module of the process that holds one engine."""
_V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@dataclass(frozen=True)
class Kind:
    """How an engine computes attention."""

    backend: str
    """Name of vLLM's enumeration."""
    environment: Mapping[str, str]
    cascade: bool = False
    """Whether vLLM may read the prefix that a whole batch shares once."""


KINDS: Mapping[str, Kind] = {
    "FLASH_ATTN": Kind("FLASH_ATTN", {}),
    "CUSTOM": Kind("CUSTOM", {}),
    "ALL": Kind("CUSTOM", {"NOSTALL_VLLM_ATTENTION": "all"}),
    "TRITON_ATTN": Kind("TRITON_ATTN", {}),
    "CASCADE": Kind("FLASH_ATTN", _V1, cascade=True),
    "V1": Kind("CUSTOM", _V1),
    "CPU_ATTN": Kind("CPU_ATTN", {}),
    "CPU_AGAIN": Kind("CPU_ATTN", {}),
}
"""Engines by name. FLASH_ATTN: as vLLM starts it; CUSTOM: the plug-in with its default; ALL: with
all steps; CASCADE and V1: FLASH_ATTN and CUSTOM in the V1 model runner, which alone has cascade
attention; CPU_ATTN and CPU_AGAIN: vLLM's CPU build, to try a measurement without a GPU."""


@dataclass(frozen=True)
class Settings:
    """What all engines have in common."""

    model: str
    """Content of the model's ``config.json``; its weights are random."""
    cache_gib: float
    """Keys and values of each engine."""
    longest: int = LONGEST
    """Most tokens of a request."""
    sequences: int = 256
    """Requests that run at a time."""
    traces: Path | None = None
    """Folder of the traces that workloads name."""
    compiled: Path | None = None
    """Folder that keeps what vLLM compiles; None: it is compiled anew."""
    cache_dtype: str = "auto"
    """vLLM's name of the dtype of keys and values."""


@contextmanager
def started(names: Sequence[str], settings: Settings, start_s: float) -> Iterator[list[Engine]]:
    """The engines of these names; one that has not started in time has a problem."""
    until = monotonic() + start_s
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        engines: list[Engine] = []
        try:
            for name in names:
                engines.append(_engine(name, Path(folder) / name, settings))
            for engine in engines:
                engine.connect(until)
            yield engines
        finally:
            for engine in engines:
                engine.end()


def _engine(name: str, own: Path, settings: Settings) -> Engine:
    kind = KINDS[name]
    model = own / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(settings.model)
    arguments = [CHILD, "--backend", kind.backend, "--cache-gib", str(settings.cache_gib),
                 "--cache-dtype", settings.cache_dtype, "--longest", str(settings.longest),
                 "--sequences", str(settings.sequences)]  # fmt: skip
    arguments += ["--cascade"] if kind.cascade else []
    arguments += ["--traces", str(settings.traces.resolve())] if settings.traces else []
    environment = dict(kind.environment)
    if settings.compiled is not None:
        environment["VLLM_CACHE_ROOT"] = str(settings.compiled.resolve() / name)
    return Engine(name, own, arguments, environment)
