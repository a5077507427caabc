"""Configuration and result of a run: the files that the launcher and its ranks exchange.

This module imports nothing heavy, so the launcher can use it without loading PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nostall.core.errors import BadInput, MissingPart

Device = Literal["cpu", "cuda"]
Engine = Literal["auto", "p2p", "torch"]
"""``torch``: torch.distributed.pipelining, for equal replication; ``p2p``: nostall's own executor,
for any plan; ``auto``: ``torch`` if it supports the plan, else ``p2p``."""


@dataclass(frozen=True)
class RunConfig:
    """Configuration of each rank of ``nostall launch``."""

    plan: str
    """Path of the plan file."""
    module: str
    """``path.py:build`` of the job."""
    steps: int
    """Iterations."""
    device: Device
    engine: Engine
    check: bool
    """Whether to train in a single process, too, and compare losses and gradients."""
    deadline: float
    """Longest wait for another rank, in seconds."""
    compile: bool = False
    """Whether Inductor compiles what a rank computes between collectives."""
    capture: bool = False
    """Whether a step is one CUDA graph."""


@dataclass
class RunResult:
    """Losses, measured times and memory of a run; lists have one entry per iteration."""

    engine: str
    """The engine that ran the plan: ``torch``, ``p2p``, or ``sharded`` for a sharding plan."""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Measured time of the slowest rank, without the optimiser step."""
    launch_seconds: list[float] = field(default_factory=list)
    """Seconds until ``step`` returned on the slowest rank; the GPU may still be running."""
    update_seconds: list[float] = field(default_factory=list)
    """Seconds of the optimiser's step on the slowest rank."""
    peak_bytes: list[int] = field(default_factory=list)
    """Measured peak GPU memory of each rank; empty on a CPU."""
    reference_losses: list[float] = field(default_factory=list)
    """Losses of training in a single process; empty without ``check``."""
    worst_gradient: float | None = None
    """Largest difference of a gradient from training in a single process, divided by the
    tolerance, over all ranks and iterations; infinite if a value is not a number, None without
    ``check``."""
    worst_loss: float | None = None
    """The same for the losses."""
    collectives: dict[str, int] = field(default_factory=dict)
    """Collectives of a step by kind, of a sharding plan; empty for a pipeline plan."""
    notes: list[str] = field(default_factory=list)
    """What is not compiled or not captured on rank 0, with the reason."""

    @property
    def whole_seconds(self) -> list[float]:
        """Measured time of each step with its optimiser."""
        return [sum(own) for own in zip(self.seconds, self.update_seconds, strict=True)]

    @property
    def is_equal(self) -> bool:
        """Whether no checked gradient or loss differs by more than the tolerance."""
        return all(error is None or error <= 1 for error in (self.worst_gradient, self.worst_loss))


def error_file(folder: Path, rank: int) -> Path:
    """Path of the file in which a rank writes the error that stopped it."""
    return folder / f"error-{rank}.json"


def result_file(folder: Path) -> Path:
    """Path of the file in which rank 0 writes the :class:`RunResult`."""
    return folder / "result.json"


def resolve_device(requested: str | None) -> Device:
    """Check the requested device; for None, choose cuda if there is a GPU, else cpu.

    Raises :class:`BadInput` if the name is unknown, and :class:`MissingPart` if PyTorch is not
    installed or sees no GPU although cuda was requested.
    """
    if requested not in (None, "cpu", "cuda"):
        raise BadInput(f"device {requested!r} is unknown; allowed are cpu and cuda")
    try:
        import torch
    except ImportError as error:
        raise MissingPart(
            "running a plan needs PyTorch, which is missing; pip install 'nostall[torch]'"
        ) from error
    has_gpu = torch.cuda.is_available()
    if requested == "cuda" and not has_gpu:
        raise MissingPart("PyTorch sees no CUDA GPU on this machine; give --device cpu")
    return "cpu" if requested == "cpu" or not has_gpu else "cuda"
