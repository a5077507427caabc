"""The form of everything that the backend keeps or tells other ranks."""

from __future__ import annotations

from typing import Any, Self

import msgspec


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record that is read as it was written, or not at all.

    Not pydantic's: to import that takes as long as all else that a program needs which runs an
    earlier choice.
    """

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Raises :class:`msgspec.DecodeError`, also where it is not of this form."""
        return msgspec.json.decode(data, type=cls)

    @property
    def json(self) -> bytes:
        """As text; equal records are equal bytes."""
        return msgspec.json.encode(self, enc_hook=_plain)


def _plain(value: object) -> object:
    """PyTorch's version is a ``str`` of its own, a shape a ``tuple``, a median a ``float``."""
    kinds: tuple[type[Any], ...] = (str, int, float, tuple)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    raise NotImplementedError(f"a record holds {value!r}; allowed are plain values and records")
