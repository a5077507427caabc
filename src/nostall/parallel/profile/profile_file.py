"""Reader and writer of profile files: PipeDream graph text (read only) and nostall's JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from nostall.core.files.atomic import write_text_atomically
from nostall.core.validation import load_json
from nostall.parallel.errors import BadProfile
from nostall.parallel.profile.layers import Layer, Profile, Tensor
from nostall.parallel.profile.pipedream import parse_graph

_BATCH_IN_FILE_NAME = re.compile(r"pbs-(\d+)")
"""DAPPLE's profiles state their batch size only in the file name: ``bert-48-pbs-2.txt``."""


class _StrictRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _LayerRecord(_StrictRecord):
    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: float = 0.0
    stored_bytes: float | None = None
    weight_gradient_s: float | None = None


class _TensorRecord(_StrictRecord):
    producer: int
    last_consumer: int
    bytes: float
    gradient: bool = True


class ProfileRecord(_StrictRecord):
    """The JSON form of a profile, also embedded in plan files."""

    nostall_profile: Literal[1]
    name: str
    batch: int | None = None
    layers: list[_LayerRecord]
    tensors: list[_TensorRecord]
    passes: int | None = None
    spread: float | None = None


def load_profile(path: Path) -> Profile:
    """Read a profile file: JSON if the text begins with ``{``, otherwise PipeDream graph text.

    Raises :class:`BadProfile` if the file cannot be read or its content is not allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadProfile(
            f"cannot read {path}: {error.strerror}; give the path of a profile file"
        ) from error
    except UnicodeDecodeError as error:
        raise BadProfile(
            f"{path} is not UTF-8 text; give a profile as JSON or PipeDream graph text"
        ) from error
    if not text.lstrip().startswith("{"):
        batch = _BATCH_IN_FILE_NAME.search(path.name)
        return parse_graph(text, path.stem, int(batch[1]) if batch else None)
    try:
        record = load_json(ProfileRecord, text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise BadProfile(
            f"{path}: {field}: {first['msg']}; allowed is JSON with `nostall_profile` 1, layers "
            "and tensors; write it with nostall.parallel.save_profile"
        ) from error
    return from_record(record)


def from_record(record: ProfileRecord) -> Profile:
    """Convert a validated record to a profile; raises :class:`BadProfile` if a value is invalid."""
    return Profile(
        record.name,
        tuple(Layer(**layer.model_dump()) for layer in record.layers),
        tuple(Tensor(**tensor.model_dump()) for tensor in record.tensors),
        record.batch,
        record.passes,
        record.spread,
    )


def to_record(profile: Profile) -> ProfileRecord:
    """Convert a profile to its JSON record; the inverse of :func:`from_record`."""
    return ProfileRecord(
        nostall_profile=1,
        name=profile.name,
        batch=profile.batch,
        layers=[
            _LayerRecord(**{f: getattr(layer, f) for f in _LayerRecord.model_fields})
            for layer in profile.layers
        ],
        tensors=[
            _TensorRecord(**{f: getattr(tensor, f) for f in _TensorRecord.model_fields})
            for tensor in profile.tensors
        ],
        passes=profile.passes,
        spread=profile.spread,
    )


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON; :func:`load_profile` reads an equal profile back."""
    record = to_record(profile).model_dump()
    write_text_atomically(path, json.dumps(record, indent=1) + "\n")
