"""Mutations of bundles and policy files that keep the container sound.

Damage anywhere in such a file is found by a check sum or a length first. These mutations damage
what is inside, and make hashes and lengths fit again.
"""

from __future__ import annotations

import io
import json
import random
import zipfile
import zlib
from collections.abc import Callable

from nostall.store.artefacts import content_hash
from tests.fuzz.file_mutants import BINARY_MUTATIONS, TEXT_MUTATIONS, doubling

MANIFEST = "manifest.json"
_HEADER = "nostall.policy"


def _text(data: bytes, rng: random.Random) -> bytes:
    return rng.choice(TEXT_MUTATIONS)(data, rng)


def _binary(data: bytes, rng: random.Random) -> bytes:
    return rng.choice(BINARY_MUTATIONS)(data, rng)


def _members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _pack(members: dict[str, bytes], rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def _if_sound(
    change: Callable[[bytes, random.Random], bytes], data: bytes, rng: random.Random
) -> bytes:
    """Apply a change of the content; damage the bytes if another mutation broke the container."""
    try:
        return change(data, rng)
    except (zipfile.BadZipFile, zlib.error, LookupError, ValueError, OSError, RuntimeError):
        return _binary(data, rng)


def bundled_manifest(data: bytes, rng: random.Random) -> bytes:
    """Damage the manifest of a bundle."""

    def change(data: bytes, rng: random.Random) -> bytes:
        members = _members(data)
        members[MANIFEST] = _text(members[MANIFEST], rng)
        return _pack(members, rng)

    return _if_sound(change, data, rng)


def bundled_record(data: bytes, rng: random.Random) -> bytes:
    """Damage the provenance of a record; its name and the manifest get the new hash."""

    def change(data: bytes, rng: random.Random) -> bytes:
        members = _members(data)
        name = rng.choice([m for m in members if m.endswith(".json") and m != MANIFEST])
        damaged = _text(members.pop(name), rng)
        _rename(members, name.removesuffix(".json"), damaged, ".json")
        return _pack(members, rng)

    return _if_sound(change, data, rng)


def bundled_cubin(data: bytes, rng: random.Random) -> bytes:
    """Damage a cubin of a bundle; all that names it gets the new hash."""

    def change(data: bytes, rng: random.Random) -> bytes:
        members = _members(data)
        name = rng.choice([m for m in members if m.endswith(".cubin")])
        damaged = _binary(members.pop(name), rng)
        _rename(members, name.removesuffix(".cubin"), damaged, ".cubin")
        for record in [m for m in members if m.endswith(".json") and m != MANIFEST]:
            _rename(members, record.removesuffix(".json"), members.pop(record), ".json")
        return _pack(members, rng)

    return _if_sound(change, data, rng)


def _rename(members: dict[str, bytes], old: str, data: bytes, suffix: str) -> None:
    """Add a member under its hash, and write that hash where the old one was."""
    new = content_hash(data)
    for name in [m for m in members if m.endswith(".json")]:
        members[name] = members[name].replace(old.encode(), new.encode())
    members[new + suffix] = data


def policy_header(data: bytes, rng: random.Random) -> bytes:
    """Damage the header of a policy file; its length stays right."""

    def change(data: bytes, rng: random.Random) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header, weights = data[8 : 8 + length], data[8 + length :]
        if rng.random() < 0.6:
            document = json.loads(header)
            inner = _text(document["__metadata__"][_HEADER].encode(), rng)
            document["__metadata__"][_HEADER] = inner.decode(errors="replace")
            header = json.dumps(document).encode()
        else:
            header = _text(header, rng)
        return len(header).to_bytes(8, "little") + header + weights

    return _if_sound(change, data, rng)


_DAMAGE = tuple(mutation for mutation in BINARY_MUTATIONS if mutation is not doubling)
"""Mutations that do not leave the container as it is."""
BUNDLE_MUTATIONS = (
    *_DAMAGE,
    *(bundled_manifest, bundled_manifest, bundled_record, bundled_record, bundled_record),
    *(bundled_record, bundled_cubin, bundled_cubin),
)
"""Mutations for bundles."""

POLICY_MUTATIONS = (*_DAMAGE, *[policy_header] * 12)
"""Mutations for policy files."""
