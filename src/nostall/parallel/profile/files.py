"""Profiles as files: PipeDream graph text, or nostall's own JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from nostall.core.files import write_atomically
from nostall.parallel.errors import BadProfile
from nostall.parallel.profile.layers import Layer, Profile, Tensor
from nostall.parallel.profile.pipedream import parse_graph

_BATCH = re.compile(r"pbs-(\d+)")
"""DAPPLE's files carry their batch size in their name only: ``bert-48-pbs-2.txt``."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _LayerRecord(Strict):
    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: float = 0.0
    stored_bytes: float | None = None
    weight_gradient_s: float | None = None


class _TensorRecord(Strict):
    producer: int
    last_consumer: int
    bytes: float
    gradient: bool = True


class ProfileRecord(Strict):
    nostall_profile: Literal[1]
    name: str
    batch: int | None = None
    layers: list[_LayerRecord]
    tensors: list[_TensorRecord]


def load_profile(path: Path) -> Profile:
    """Read a profile; what begins with ``{`` is JSON, everything else PipeDream graph text.

    Raises :class:`BadProfile`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadProfile(f"cannot read {path}: {error.strerror}; give a profile") from error
    except UnicodeDecodeError as error:
        raise BadProfile(f"{path} is not text; give a profile as JSON or graph text") from error
    if not text.lstrip().startswith("{"):
        found = _BATCH.search(path.name)
        return parse_graph(text, path.stem, int(found[1]) if found else None)
    try:
        record = ProfileRecord.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise BadProfile(
            f"{path}: {where}: {first['msg']}; `nostall_profile` 1 with layers and tensors is "
            "allowed; write it with nostall.parallel.save_profile"
        ) from error
    return from_record(record)


def from_record(record: ProfileRecord) -> Profile:
    """The profile of a validated record; raises :class:`BadProfile`."""
    return Profile(
        record.name,
        tuple(Layer(**layer.model_dump()) for layer in record.layers),
        tuple(Tensor(**tensor.model_dump()) for tensor in record.tensors),
        record.batch,
    )


def to_record(profile: Profile) -> ProfileRecord:
    """The inverse of :func:`from_record`."""
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
    )


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON that :func:`load_profile` reads back unchanged."""
    record = to_record(profile).model_dump()
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
