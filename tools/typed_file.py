"""Files of values whose types are known: reading one runs no code, as reading a pickle could."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_atomically

Value = TypeVar("Value")


def write_typed(path: Path, value: object) -> None:
    """Write dataclasses, containers and plain values as MessagePack.

    Raises :class:`~nostall.core.errors.BadRun` if the file cannot be written.
    """
    write_atomically(path, msgspec.msgpack.encode(value))


def read_typed(path: Path, type: type[Value]) -> Value:
    """The value of type ``type`` that :func:`write_typed` wrote.

    Raises :class:`BadInput` if the file cannot be read or holds something else.
    """
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=type, dec_hook=_counter)
    except OSError as error:
        raise BadInput(
            f"cannot read {path}: {error.strerror}; check the path and its permissions"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{path} holds something else than this version of nostall writes ({error}); delete it"
        ) from error


def _counter(type: type, value: Any) -> Any:
    """A counter, the only type here that msgspec does not know."""
    if get_origin(type) is not Counter:
        raise NotImplementedError(f"no file holds a {type}")
    (key,) = get_args(type)
    return Counter(msgspec.convert(value, dict[key, int]))  # type: ignore[valid-type]
