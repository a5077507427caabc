"""Messages of a Chakra file: lengths, and the next message behind damaged bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nostall.core.errors import BadTrace
from nostall.core.text.plurals import pluralize
from nostall.workload.traces.chakra.protobuf import read_varint

MAX_NODE = 64 << 20
"""Size limit of a node in bytes; a file with a larger length is not a Chakra trace."""
_MAX_FOUND = 1 << 20
"""Size limit of a node that is found behind damage."""
_WINDOW = 1 << 16
_OVERLAP = 32
"""Bytes of a window that the next one has, too, because a node can start in them."""
_NODE_START = re.compile(
    rb"(?:\x08[\x80-\xff]{0,9}[\0-\x7f])?\x12(?:[\x01-\x7f]|[\x80-\xff][\x01-\x7f])[ -~]"
)
"""First fields of a node: the id, unless it is 0, and the name with its length."""
_MAX_WORK = 16
"""Bytes that may be parsed in the search for messages, as a multiple of the file's size."""

IsNode = Callable[[bytes], bool]
"""Whether the bytes of a message are those of a node."""


@dataclass(slots=True)
class ChakraFile:
    """A file of length-delimited messages; damaged messages are skipped and counted."""

    path: Path
    is_node: IsNode
    skipped: int = 0
    """Damaged messages; neighbouring ones are counted as one if their lengths are damaged."""
    first_damage: int | None = None
    """Offset of the first one."""
    end_damage: str | None = None
    """Cause if the file stops inside a message; None: it does not."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Damage of the file, a sentence each."""
        remarks = [self.end_damage] if self.end_damage else []
        if self.skipped:
            verb = "is" if self.skipped == 1 else "are"
            remarks.append(
                f"{pluralize(self.skipped, 'node')} {verb} damaged and {verb} skipped, first at "
                f"byte {self.first_damage}"
            )
        return tuple(remarks)

    def messages(self) -> Iterator[bytes]:
        """The first message, which is the metadata, and all messages that are nodes.

        Raises :class:`~nostall.core.errors.BadTrace` if the file cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(0, 2)
                size = file.tell()
                yield from self._read(file, size)
        except OSError as error:
            raise BadTrace(
                f"cannot read {self.path}: {error.strerror or error}; check the path and its "
                "permissions"
            ) from error

    def _read(self, file: IO[bytes], size: int) -> Iterator[bytes]:
        offset, is_first, work = 0, True, _MAX_WORK * size
        while offset < size:
            end, message = _read_message(file, offset, size)
            if message is not None and (is_first or self.is_node(message)):
                yield message
                offset, is_first = end, False
                continue
            following, used = self._next_node(file, offset + 1, size, work)
            work -= used
            if end > size and following == size:
                self.end_damage = f"the file stops at byte {size}, inside the node at byte {offset}"
                return
            self.skipped += 1
            self.first_damage = offset if self.first_damage is None else self.first_damage
            is_first = False
            # If a node follows, only this one is damaged.
            is_delimited = message is not None and _is_message(file, end, size, self.is_node)
            offset = end if is_delimited else following

    def _next_node(self, file: IO[bytes], offset: int, size: int, work: int) -> tuple[int, int]:
        """(offset of the next message that is a node, bytes parsed to find it)."""
        used = 0
        while offset < size and used < work:
            file.seek(offset)
            window = file.read(_WINDOW)
            used += len(window)
            for match in _NODE_START.finditer(window):
                key = offset + match.start()
                for prefix in (1, 2, 3):
                    start = key - prefix
                    if start < offset:
                        break
                    message = _read_message(file, start, size, _MAX_FOUND, prefix)[1]
                    used += len(message or b"")
                    if message is not None and self.is_node(message):
                        return start, used
                    if used > work:
                        return size, used
            offset += max(len(window) - _OVERLAP, 1)
        return size, used


def _read_message(
    file: IO[bytes], offset: int, size: int, limit: int = MAX_NODE, prefix: int = 0
) -> tuple[int, bytes | None]:
    """(end, bytes) of the message at ``offset``; None if its length is not valid.

    ``prefix`` is the number of bytes that the length must have; 0: any number.
    """
    file.seek(offset)
    head = file.read(10)
    try:
        length, used = read_varint(head, 0)
    except (IndexError, BadTrace):
        return size + 1, None
    end = offset + used + length
    if length == 0 or length > limit or end > size or (prefix and used != prefix):
        return end, None
    file.seek(offset + used)
    return end, file.read(length)


def _is_message(file: IO[bytes], offset: int, size: int, is_node: IsNode) -> bool:
    """Whether a node, or the end of the file, is at ``offset``."""
    if offset == size:
        return True
    message = _read_message(file, offset, size)[1]
    return message is not None and is_node(message)
