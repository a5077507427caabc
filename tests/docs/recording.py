"""Recordings of the GPU commands of tutorials: what they printed and what they measured."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from nostall.gpu.replayed_device import OutcomeRecord

FOLDER = Path(__file__).parent / "recorded"


class DeviceRecording(BaseModel):
    """What one device of a command measured, in the order of the calls."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    info: dict[str, str]
    """:attr:`nostall.gpu.Device.info`."""
    original: str
    """sha256 of the cubin that the device was opened for."""
    outcomes: tuple[OutcomeRecord, ...] = ()


class GpuCommand(BaseModel):
    """One GPU command of a page."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    line: str
    returncode: int
    seconds: float
    output: str
    """Standard output and standard error."""
    devices: tuple[DeviceRecording, ...] = ()
    """Devices in the order in which the command opened them; empty if it measures otherwise."""


class PageRecording(BaseModel):
    """All GPU commands of a page, with the machine that ran them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    page: str
    date: str
    machine: dict[str, str]
    """GPU, and the versions of the packages that generate code."""
    files: dict[str, str]
    """sha256 of the files that the page writes, by name."""
    commands: tuple[GpuCommand, ...]


def find(page: str, folder: Path = FOLDER) -> PageRecording | None:
    """The recording of a page, or None if there is none."""
    path = folder / f"{page}.json"
    return PageRecording.model_validate_json(path.read_text("utf-8")) if path.exists() else None


def file_hashes(files: dict[str, str]) -> dict[str, str]:
    """sha256 of each text, by name."""
    return {name: sha256(text.encode()) for name, text in files.items()}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
