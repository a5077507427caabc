"""Recordings of the GPU commands of tutorials: what they printed and what they measured."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from nostall.sass.binary.cubin import Cubin
from nostall.sass.program import cover_rules
from nostall.sass.safety import latency
from tests.unit.gpu.replayed_device import OutcomeRecord

FOLDER = Path(__file__).parent / "recorded"


class DeviceRecording(BaseModel):
    """What one device of a command measured, in the order of the calls."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    info: dict[str, str]
    """:attr:`nostall.gpu.Device.info`."""
    original: str
    """:func:`code_hash` of the cubin that the device was opened for."""
    outcomes: tuple[OutcomeRecord, ...] = ()
    """Outcomes; ``cubin`` is the :func:`code_hash` of the candidate."""


class GpuCommand(BaseModel):
    """One GPU command of a page."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    line: str
    returncode: int
    seconds: float
    output: str
    """Standard output and standard error."""
    devices: tuple[DeviceRecording, ...] = ()
    """Devices in the order in which the command opened them; empty if it is not replayed."""


class PageRecording(BaseModel):
    """All GPU commands of a page, with the machine that ran them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    page: str
    date: str
    machine: dict[str, str]
    """GPU, and the versions of the packages that generate code."""
    files: dict[str, str]
    """sha256 of the files that the page writes, by name."""
    rules: str = ""
    """:func:`rules_hash` when the commands ran."""
    commands: tuple[GpuCommand, ...]


def find(page: str, folder: Path = FOLDER) -> PageRecording | None:
    """The recording of a page, or None if there is none."""
    path = folder / f"{page}.json"
    return PageRecording.model_validate_json(path.read_text("utf-8")) if path.exists() else None


def rules_hash() -> str:
    """sha256 of the verifier's tables, in-order rules and witnessed pairs.

    They decide which moves a search may make, so a search with other ones takes other steps, which
    a recording does not have.
    """
    floors = Path(latency.__file__).parent / "floors"
    rules = Path(cover_rules.__file__)
    files = [*sorted(floors.rglob("*.json")), rules, rules.with_name("witnessed_pairs.json")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def file_hashes(files: dict[str, str]) -> dict[str, str]:
    """sha256 of each text, by name."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}


def code_hash(cubin: bytes) -> str:
    """sha256 of the machine code of a cubin.

    The rest does not count, because Triton writes the folder of the source file into a cubin.
    """
    texts = Cubin.parse(cubin).texts
    code = b"".join(cubin[text.file_offset :][: text.size] for text in texts)
    return hashlib.sha256(code).hexdigest()
