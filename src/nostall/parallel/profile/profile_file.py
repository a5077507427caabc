"""Reader and writer of profile files: PipeDream graph text (read only) and nostall's JSON."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from nostall.core.files.atomic import write_text_atomically
from nostall.core.validation import first_problem, load_json
from nostall.parallel.errors import BadProfile
from nostall.parallel.profile.layers import Layer, Profile, Tensor
from nostall.parallel.profile.pipedream import parse_graph

_BATCH_IN_FILE_NAME = re.compile(r"pbs-(\d+)")
"""DAPPLE's profiles state their batch size only in the file name: ``bert-48-pbs-2.txt``."""


class ProfileRecord(BaseModel):
    """The JSON form of a profile, also embedded in plan files."""

    model_config = ConfigDict(extra="forbid")

    nostall_profile: Literal[1]
    name: str
    batch: int | None = None
    layers: list[Layer]
    tensors: list[Tensor]
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
        raise BadProfile(
            f"{path}: {first_problem(error)}; allowed is JSON with `nostall_profile` 1, layers "
            "and tensors; write it with nostall.parallel.save_profile"
        ) from error
    return from_record(record)


def from_record(record: ProfileRecord) -> Profile:
    """Convert a validated record to a profile; raises :class:`BadProfile` if a value is invalid."""
    values = {field.name: getattr(record, field.name) for field in fields(Profile)}
    layers, tensors = tuple(record.layers), tuple(record.tensors)
    return Profile(**values | {"layers": layers, "tensors": tensors})


def to_record(profile: Profile) -> ProfileRecord:
    """Convert a profile to its JSON record; the inverse of :func:`from_record`."""
    values = {field.name: getattr(profile, field.name) for field in fields(Profile)}
    return ProfileRecord(nostall_profile=1, **values)


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON; :func:`load_profile` reads an equal profile back."""
    record = to_record(profile).model_dump()
    write_text_atomically(path, json.dumps(record, indent=1) + "\n")
