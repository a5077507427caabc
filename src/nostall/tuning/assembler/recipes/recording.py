"""Recording of a measured assembler search: one JSON file that other machines replay."""

from __future__ import annotations

import base64
import binascii
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from nostall.core import BadInput, Comparison, LaunchSpec, Run
from nostall.core.errors import BadRun
from nostall.core.files.atomic import write_atomically
from nostall.core.launch import StrictModel
from nostall.core.validation import dump_json, load_json
from nostall.store.provenance import Sha256
from nostall.tuning.assembler.candidate_log import CANDIDATES_FILE, read_candidates
from nostall.tuning.assembler.recipes.recipe import Recipe, hash_text
from nostall.tuning.settings import PTX_FILE, RECIPE_FILE
from nostall.tuning.sources.source import Source

MAX_UNPACKED_BYTES = 64 << 20
"""Size allowed for one packed field."""
_KEY_DIGITS = 32
"""Hexadecimal digits of the sha256 of a PTX text in a candidate; enough to find it."""
_SETTINGS = ("strategy", "seed", "seconds", "evaluations", "rounds", "checks", "clock", "cold")


def pack(data: bytes) -> str:
    """Bytes as text: gzip, then base64."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def unpack(text: str) -> bytes:
    """The bytes of :func:`pack`; raises :class:`ValueError` if they are damaged or too large."""
    try:
        data = base64.b64decode(text, validate=True)
        decoder = zlib.decompressobj(wbits=31)
        unpacked = decoder.decompress(data, MAX_UNPACKED_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"packed bytes are damaged ({error})") from error
    if not decoder.eof:
        raise ValueError(f"packed bytes are cut off, or more than {MAX_UNPACKED_BYTES}")
    return unpacked


def _require_packed(text: str) -> str:
    unpack(text)
    return text


Packed = Annotated[str, AfterValidator(_require_packed)]
"""Text of :func:`pack`."""
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Samples(StrictModel):
    """Samples of the final comparison, in seconds a launch."""

    original: tuple[Seconds, ...] = Field(min_length=2)
    candidate: tuple[Seconds, ...] = Field(min_length=2)
    null: tuple[Seconds, ...] = Field(min_length=2)
    loads: int = Field(ge=1)
    checks: int = Field(ge=1)
    """Random inputs on which the outputs were equal, bit by bit."""

    def compare(self, seed: int) -> Comparison:
        """The comparison of these samples."""
        return Comparison.from_samples(
            self.original,
            self.candidate,
            self.null,
            kind="measured",
            seed=seed,
            loads=self.loads,
        )


class Recording(StrictModel):
    """What a search measured, and all that is needed to make and to verify its winner again."""

    format: Literal["nostall recording"] = "nostall recording"
    schema_version: Literal[1] = 1
    kernel: str
    """Name of the kernel in the PTX."""
    origin: str
    """File name and kernel, without folders."""
    source: Sha256
    """sha256 of the file: the Triton kernel's Python file, or the PTX."""
    arch: str
    launch: LaunchSpec
    provenance: dict[str, str]
    """Compiler, its options and its ptxas."""
    gpu: str
    driver: str
    date: str
    """Day of the measurement, as in ISO 8601."""
    device: dict[str, str]
    """GPU, clocks and temperature as read before the search."""
    settings: dict[str, Any]
    ptx: Packed
    original: Packed
    """The compiler's cubin."""
    winner: Packed | None
    """The result's cubin; None if nothing better was found."""
    recipe: Recipe | None
    comparison: Samples | None
    """The comparison that decided; None if nothing was compared."""
    original_s: Seconds
    """Time of the original at the start of the search."""
    evaluations: int = Field(ge=1)
    seconds: float = Field(ge=0)
    """Duration of the search."""
    stopped: str
    assembler: dict[str, Any]
    """What the search did; see :meth:`AssemblerJob.describe`."""
    candidates: Packed
    """JSON lines [sha256 of the PTX, lever, result, ratios original / candidate], in order."""

    @property
    def ptx_text(self) -> str:
        return unpack(self.ptx).decode()

    def candidate_records(self) -> Iterable[tuple[str, str, str, tuple[float, ...]]]:
        """(start of the PTX's sha256, lever, result, ratios) of each measurement, in order."""
        for line in unpack(self.candidates).decode().splitlines():
            key, lever, result, ratios = json.loads(line)
            yield str(key), str(lever), str(result), tuple(map(float, ratios))

    def fits(self, source: Source) -> bool:
        """Whether this is a recording of the same source for the same launch."""
        is_same = self.source == hash_source(source) or (
            source.ptx is not None and hash_text(source.ptx) == hash_text(self.ptx_text)
        )
        is_same_launch = source.launch is None or _shape(source.launch) == _shape(self.launch)
        return is_same and is_same_launch and source.provenance.get("arch") == self.arch

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a recording file.  Raises :class:`BadInput`, which names the field, if invalid."""
        try:
            return load_json(cls, path.read_bytes())
        except OSError as error:
            raise BadInput(f"cannot read recording {path}: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the file"
            raise BadInput(
                f"{path} is not a recording: {field}: {first['msg']}; `nostall tune --objective "
                "gpu --record FILE` makes one"
            ) from error

    def write(self, path: Path) -> None:
        """Write the file.  Raises :class:`BadRun` if that is not possible."""
        write_atomically(path, (dump_json(self) + "\n").encode())


def hash_source(source: Source) -> str:
    """The sha256 of a source's file: the Python file of a Triton kernel, otherwise the PTX."""
    file, colon, _ = source.origin.rpartition(":")
    if colon and file.endswith(".py") and Path(file).is_file():
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return hash_text(source.ptx or "")


def record_run(run: Run, source: Source) -> Recording:
    """The recording of a finished run of the assembler search.

    Raises :class:`BadInput` if the run is not measured, or lacks a file.
    """
    result = run.record.result or {}
    try:
        device = dict(result["model"])
        recipe_file = run.path / RECIPE_FILE
        improved = bool(result["improved"]) and recipe_file.exists()
        assert source.launch is not None
        return Recording(
            kernel=source.kernel,
            origin=Path(source.origin).name,
            source=hash_source(source),
            arch=source.provenance["arch"],
            launch=source.launch,
            provenance=dict(source.provenance),
            gpu=device["gpu"],
            driver=device.get("driver_version", "unknown"),
            date=run.record.created[:10],
            device=device,
            settings={k: v for k, v in run.record.settings.items() if k in _SETTINGS},
            ptx=pack((run.path / PTX_FILE).read_bytes()),
            original=pack((run.path / "original.cubin").read_bytes()),
            winner=pack((run.path / "best.cubin").read_bytes()) if improved else None,
            recipe=Recipe.from_bytes(recipe_file.read_bytes(), RECIPE_FILE) if improved else None,
            comparison=_samples(result.get("comparison")),
            original_s=result["searched"]["original"],
            evaluations=result["evaluations"],
            seconds=result["seconds"],
            stopped=result["stopped"],
            assembler=result["assembler"],
            candidates=pack(_candidate_lines(run.path / CANDIDATES_FILE).encode()),
        )
    except (OSError, KeyError, ValueError) as error:
        raise BadInput(
            f"{run.path} cannot be recorded ({error}); only a run of --strategy assembler "
            "--objective gpu that has ended can"
        ) from error


def _samples(comparison: Mapping[str, Any] | None) -> Samples | None:
    if not comparison or "samples" not in comparison:
        return None
    loads, checks = comparison.get("loads", 1), comparison["checks"]
    return Samples(**comparison["samples"], loads=loads, checks=checks)


def _candidate_lines(path: Path) -> str:
    """One line for each measurement; repeated ones have the key of the first one."""
    keys: dict[str, str] = {}
    lines = []
    for record in read_candidates(path):
        if "ptx_sha256" in record:
            keys.setdefault(record["key"], record["ptx_sha256"][:_KEY_DIGITS])
        ratios = [round(ratio, 5) for ratio in record["ratios"]]
        entry = (keys.get(record["key"], ""), record["lever"], record["result"], ratios)
        lines.append(json.dumps(entry, separators=(",", ":")))
    return "\n".join(lines)


def _shape(launch: LaunchSpec) -> dict[str, Any]:
    """The parts of a launch that do not depend on the compiler's release."""
    args = [a for a in launch.args if a.name not in ("global_scratch", "profile_scratch")]
    return launch.model_copy(update={"args": tuple(args), "shared": 0}).model_dump()


def find_recording(source: Source, folder_name: str = "recordings") -> tuple[Recording | None, str]:
    """The recording of a kernel in the folder ``recordings`` beside its file, or why there is none.

    A file that cannot be read is left out and named in the reason.
    """
    file = Path(source.origin.rpartition(":")[0] or source.origin)
    folder = file.parent / folder_name
    reasons = []
    for path in sorted(folder.glob("*.json")):
        try:
            recording = Recording.read(path)
        except (BadInput, BadRun) as error:
            reasons.append(str(error))
            continue
        if recording.origin != Path(source.origin).name:
            continue
        if recording.fits(source):
            return recording, ""
        reasons.append(
            f"{path} was made for another version of the file, another launch or another "
            f"architecture ({recording.arch})"
        )
    return None, "; ".join(reasons) or f"{folder} has no recording of this kernel"
