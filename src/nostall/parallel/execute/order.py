"""What the launcher and its ranks tell each other, through files in one folder.

Apart from what runs, so that the launcher need not load all of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nostall.core.errors import BadInput, MissingPart

Device = Literal["cpu", "cuda"]
Engine = Literal["auto", "p2p", "torch"]


@dataclass(frozen=True)
class Order:
    """What each rank is to do.  ``deadline`` in seconds: the longest wait for another rank."""

    plan: str
    module: str
    steps: int
    device: Device
    engine: Engine
    check: bool
    deadline: float


@dataclass
class Ran:
    """What a run was.  ``seconds`` are measured: the slowest rank's, without the optimiser.

    ``worst_gradient`` is the largest difference from training in one process, as a part of the
    tolerance, over all ranks and steps; None when it was not asked for.
    """

    engine: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    reference_losses: list[float] = field(default_factory=list)
    worst_gradient: float | None = None


def error_file(folder: Path, rank: int) -> Path:
    """Where a rank says what stopped it."""
    return folder / f"error-{rank}.json"


def result_file(folder: Path) -> Path:
    """Where rank 0 says what the run was."""
    return folder / "result.json"


def device_of(wanted: str | None) -> Device:
    """The kind of device that was asked for, or a GPU where there is one."""
    if wanted not in (None, "cpu", "cuda"):
        raise BadInput(f"device {wanted!r}; allowed are cpu and cuda")
    try:
        import torch
    except ImportError as error:
        raise MissingPart(
            "running a plan needs PyTorch, which is missing; pip install 'nostall[torch]'"
        ) from error
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise MissingPart("PyTorch sees no CUDA GPU here; give --device cpu")
    return "cpu" if wanted == "cpu" or not there else "cuda"
