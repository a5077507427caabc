"""A program's bundle: which changes were proven, on which machine.

Data only, as JSON.  Binaries of the program's own kernels are records of the store in a file
beside it (:mod:`nostall.store.bundle`), each of which is verified again on another machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from nostall import __version__
from nostall.attach.program.changes import GRAPHS, MARKED
from nostall.attach.program.changing.loader import KIND as LOADER
from nostall.attach.program.changing.loader import VALUE
from nostall.attach.program.machine import CPU, cpu_name
from nostall.attach.program.start import VARIABLE
from nostall.core.errors import BadInput, MissingPart
from nostall.core.files.atomic import create_folder, write_text_atomically
from nostall.core.launch import StrictModel
from nostall.core.validation import dump_json, explain, load_json
from nostall.optimizing.engine import ARGUMENT, KIND, argument
from nostall.optimizing.program import program_environment
from nostall.optimizing.proof import Proof
from nostall.optimizing.result import Result

KERNELS_FILE = "kernels.zip"
"""Beside the bundle: the store's records of the program's own kernels."""
MAX_BYTES = 1 << 20
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_GIVEN = {"name", "kind", "value", "result_class"}
"""What the program is told of a change."""


VALUES: Mapping[str, tuple[str, ...]] = {
    "compile": ("inductor", GRAPHS, MARKED, "nostall"),
    "optimizer": ("fused", "foreach", "captured"),
    "memory_format": ("channels_last",), "matmul_precision": ("high",), "generation": ("static",),
    "native": ("store",), "loss": ("inductor",), "attention": ("cudnn", "flash"),
    "allocator": ("expandable_segments",), LOADER: ("workers=N", "workers=N,pinned"),
    KIND: ("argument=value",),
}  # fmt: skip
"""Values of each kind of change; of engines and loaders only their form."""
FORMS = {KIND: ARGUMENT, LOADER: VALUE}


class BundledChange(StrictModel):
    """One change, and what it gained."""

    name: str
    kind: str
    value: str
    """One of :data:`VALUES`."""
    result_class: str
    """What it does to results; ``changes numbers`` only after ``--allow-numerics``."""
    line: str
    """What a person would write."""
    ratio: float
    interval: tuple[float, float]

    @model_validator(mode="after")
    def _check_value(self) -> BundledChange:
        if self.kind not in VALUES:
            raise ValueError(f"{self.kind[:40]!r} is no kind; those are {', '.join(VALUES)}")
        form, is_known = FORMS.get(self.kind), self.value in VALUES[self.kind]
        if not (form.fullmatch(self.value) if form is not None else is_known):
            raise ValueError(
                f"{self.value[:40]!r} is no value of {self.kind!r}; those are "
                f"{', '.join(VALUES[self.kind])}"
            )
        return self


class BundledKernels(StrictModel):
    """The file with the binaries of the program's own kernels."""

    sha256: Sha256
    """Of :data:`KERNELS_FILE`."""
    records: Annotated[tuple[Sha256, ...], Field(min_length=1)]
    """Ids of the store's records in it."""


class Identity(StrictModel):
    """Of which program a bundle is."""

    model: Sha256
    """Of names, shapes and dtypes of its parameters and buffers."""
    sources: dict[str, Sha256]
    """Of the Python files that it imported, by module, without installed packages."""


class Machine(StrictModel):
    """What the gain was measured on."""

    device: str
    driver: str | None
    torch: str
    nostall: str
    transformers: str | None = None
    """Of a change of its ``generate``; None without one."""
    vllm: str | None = None
    """Of changes of its engines; None without one."""
    model: Sha256 | None = None
    """Of the configuration of the model in these engines."""


class Bundle(StrictModel):
    """The file that ``nostall optimize`` writes and ``nostall apply --bundle`` reads."""

    format: Literal["nostall program bundle"] = "nostall program bundle"
    schema_version: Literal[4] = 4
    """Earlier versions do not tell of which program they are."""
    identity: Identity | None
    """None in a bundle from a recording of an earlier version, which cannot be applied."""
    command: tuple[str, ...]
    machine: Machine
    step: str | None = None
    """The function that ends a step; None: found as `nostall optimize` found it."""
    step_is: str = ""
    """What a step was while it was measured, in words; empty: a step of the optimisers, or a call
    of ``step``.  In other steps nothing is changed."""
    changes: Annotated[tuple[BundledChange, ...], Field(min_length=1)]
    kernels: BundledKernels | None = None
    """Of the change ``native``; None without it."""
    ratio: float
    """Original / all changes together."""
    interval: tuple[float, float]
    null_interval: tuple[float, float]


def write_bundle(result: Result, path: Path) -> Path:
    """Write the kept changes of ``result``, at least one, to ``path``; returns ``path``.

    Raises :class:`~nostall.store.BadStore` if the store lacks a record that was measured.
    """
    changes = [
        {**(attempt.level.change or {}), "result_class": attempt.result_class,
         "line": attempt.level.line, **_numbers(attempt.proof)}
        for attempt in result.kept
    ]  # fmt: skip
    assert result.together is not None and result.together.comparison is not None
    raw = result.facts.raw if result.facts else {}
    is_generation = any(change.get("kind") == "generation" for change in changes)
    machine = {**result.machine, "nostall": __version__,
               "transformers": raw.get("transformers") if is_generation else None,
               "vllm": raw.get("engine", {}).get("vllm"),
               "model": raw.get("engine", {}).get("model_digest")}  # fmt: skip
    null = result.together.comparison.null_low, result.together.comparison.null_high
    bundle = Bundle.model_validate({
        "command": tuple(result.command), "step": result.step, "changes": tuple(changes),
        "step_is": raw.get("step_is", ""), "machine": machine, "identity": _identity(raw),
        "kernels": _write_kernels(result, path.parent / KERNELS_FILE),
        **_numbers(result.together), "null_interval": null,
    })  # fmt: skip
    write_text_atomically(path, dump_json(bundle) + "\n", parents=True)
    return path


def _identity(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = raw.get("identity")  # one digest in recordings of earlier versions
    return found if isinstance(found, dict) else None


def _write_kernels(result: Result, path: Path) -> dict[str, Any] | None:
    """Write the records of kept kernels to ``path``, or remove an earlier file."""
    attempts = [a for a in result.kept if a.level.change and a.level.change["kind"] == "native"]
    ids = sorted({k["record"] for a in attempts for k in a.kernels if k["record"]})
    if not ids:
        path.unlink(missing_ok=True)
        return None
    from nostall.store import Store, bundle  # lazy, as below: few bundles have kernels

    store = Store()
    create_folder(path.parent)
    bundle.write(store, [store.find(id)[0] for id in ids], path)
    return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "records": tuple(ids)}


def install_kernels(kernels: BundledKernels, path: Path) -> None:
    """Put the records of ``path`` into the store; those that are not there are verified here.

    Raises :class:`BadInput` if the file is missing or another one, or if a record is unsafe.
    """
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BadInput(
            f"--bundle: cannot read {path}: {error.strerror}; it belongs to the bundle, beside "
            "which `nostall optimize` wrote it"
        ) from error
    if found != kernels.sha256:
        raise BadInput(
            f"--bundle: {path} has sha256 {found[:12]}, and the bundle names {kernels.sha256[:12]};"
            " copy both files of one run"
        )
    from nostall.store import Store, bundle
    from nostall.tuning.records.store_records import import_bundle

    ids = set(bundle.read(path).ids)
    if ids != set(kernels.records):
        raise BadInput(f"--bundle: {path} has other records than the bundle; make it again")
    store = Store()
    if not ids <= {row.id for row in store.rows()}:
        import_bundle(store, path)


def _numbers(proof: Proof | None) -> dict[str, Any]:
    assert proof is not None and proof.comparison is not None
    c = proof.comparison
    return {"ratio": c.ratio, "interval": (c.low, c.high)}


def read_bundle(path: Path) -> Bundle:
    """Read a bundle; raises :class:`BadInput` if it is none or of another version."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadInput(
            f"--bundle: cannot read {path}: {error.strerror}; `nostall optimize` writes a bundle"
        ) from error
    if len(data) > MAX_BYTES:
        raise BadInput(f"--bundle: {path} has more than {MAX_BYTES} bytes, so it is no bundle")
    try:
        return load_json(Bundle, data)
    except ValidationError as error:
        raise BadInput(
            f"--bundle: {path} is no bundle of this version of nostall: {explain(error, Bundle)}; "
            "make it again with `nostall optimize`"
        ) from error


def bundle_environment(
    bundle: Bundle, path: Path, inherited: Mapping[str, str], gpu: str | None
) -> dict[str, str]:
    """``inherited`` with what makes the changes of ``bundle`` in a program.

    ``gpu`` is the name of this machine's GPU.  Raises :class:`BadInput` if the bundle is of another
    machine or version, and :class:`MissingPart` without its GPU.  PyTorch's version and the driver
    are compared in the program, whose Python can be another one.
    """
    machine, is_native = bundle.machine, any(c.kind == "native" for c in bundle.changes)
    if is_native != (bundle.kernels is not None):
        raise BadInput(
            f"--bundle: {path} lacks its kernels, or has them without need; make it anew"
        )
    if bundle.identity is None:
        raise BadInput(
            f"--bundle: {path} does not tell of which program it is, because it is from a "
            "recording of an earlier version; run `nostall optimize` here"
        )
    if machine.nostall != __version__:
        raise BadInput(_other(path, "nostall", machine.nostall, __version__))
    is_cpu = machine.device.startswith(CPU)
    if not is_cpu and gpu is None:
        raise MissingPart(
            f"--bundle: {path} was measured on {machine.device}, and no GPU is found here; run the "
            "program without it"
        )
    here = cpu_name() if is_cpu else str(gpu)
    if machine.device != here:
        raise BadInput(_other(path, "the device", machine.device, here))
    if bundle.kernels is not None:
        install_kernels(bundle.kernels, path.parent / KERNELS_FILE)
    settings = {
        "folder": os.devnull,
        "director": 0,
        "step": bundle.step,
        "step_is": bundle.step_is,
        "bundle": str(path),
        "machine": json.loads(machine.model_dump_json()),
        "identity": bundle.identity.model_dump(),
        "changes": [c.model_dump(include=_GIVEN) for c in bundle.changes],
    }
    for change in bundle.changes:
        if change.kind == LOADER:
            settings[LOADER] = change.value
    if engine := [change for change in bundle.changes if change.kind == KIND]:
        settings["engine"] = {"arguments": dict(argument(change.value) for change in engine),
                              "applied": [change.name for change in engine],
                              "vllm": bundle.machine.vllm,
                              "model": bundle.machine.model}  # fmt: skip
    return program_environment({k: v for k, v in inherited.items() if k != VARIABLE}, settings)


def _other(path: Path, part: str, wanted: str, found: str) -> str:
    return (
        f"--bundle: {path} was measured with {part} {wanted}, and here it is {found}; run "
        "`nostall optimize` here"
    )
