"""Addresses on which processes listen, read from the kernel's tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"
_LOOPBACK = ("0100007F:", "0000000000000000FFFF00000100007F:", f"{'0' * 24}01000000:")
"""127.0.0.1, the same as an IPv6 address, and ::1, as the kernel writes them."""


def listening(process: int) -> Iterator[tuple[int, str]]:
    """(process, address) of each TCP socket on which a process or one of its children listens."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                local = fields[1]
                sockets[fields[9]] = "127.0.0.1" if local.startswith(_LOOPBACK) else local
    for pid in (process, *children(process)):
        with suppress(OSError):  # the process ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inode = str(link.readlink()).removeprefix("socket:[").removesuffix("]")
                    if inode in sockets:
                        yield pid, sockets[inode]


def children(process: int) -> Iterator[int]:
    """All descendants of a process."""
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from children(child)
