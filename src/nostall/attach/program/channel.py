"""Orders to the user's program and its events, as files that the processes of a job share."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Mapping
from typing import Any

ORDERS, EVENTS = "orders.json", "events.jsonl"


class Channel:
    """The side of the channel inside the program: reads orders and appends events."""

    def __init__(self, folder: str, director: int) -> None:
        """``director``: the process id of ``nostall optimize``."""
        self.folder, self.director = folder, director
        self._orders = os.path.join(folder, ORDERS)  # noqa: PTH118 (pathlib is slow to import)
        self._events = os.path.join(folder, EVENTS)  # noqa: PTH118
        self._stamp = 0
        self._lock = threading.Lock()

    def emit(self, event: str, **fields: Any) -> None:
        """Append an event as one line."""
        line = json.dumps({"event": event, "process": os.getpid(), **fields}, default=str)
        with self._lock:
            handle = os.open(self._events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                os.write(handle, (line + "\n").encode())
            finally:
                os.close(handle)

    def new_order(self) -> Mapping[str, Any] | None:
        """The order, if it has changed since the last call."""
        try:
            stamp = os.stat(self._orders).st_mtime_ns  # noqa: PTH116
        except OSError:
            return None
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        with open(self._orders) as file:
            order: Mapping[str, Any] = json.load(file)
        return order

    def note_seen(self, number: int, rank: int, step: int) -> None:
        """Write that ``rank`` has read order ``number`` when it had run ``step`` steps."""
        with open(f"{self._orders}.{number}.{rank}", "w") as file:
            file.write(str(step))

    def seen(self, number: int, world: int) -> list[int]:
        """The steps after which ranks have seen an order, of those that have."""
        found = []
        for rank in range(world):
            name = f"{self._orders}.{number}.{rank}"
            with contextlib.suppress(OSError, ValueError), open(name) as file:  # not yet written
                found.append(int(file.read()))
        return found

    def start(self, number: int) -> int | None:
        """The step at which all ranks begin an order, if rank 0 has set one."""
        try:
            with open(f"{self._orders}.{number}") as file:
                return int(file.read())
        except (OSError, ValueError):  # not there, or not yet written
            return None

    def agree(self, number: int, step: int) -> None:
        """Set the step at which all ranks begin an order."""
        with open(f"{self._orders}.{number}", "w") as file:
            file.write(str(step))

    def is_abandoned(self) -> bool:
        """Whether ``nostall optimize`` has ended without an order, killed for example."""
        try:
            os.kill(self.director, 0)
        except ProcessLookupError:
            return True
        with contextlib.suppress(OSError), open(f"/proc/{self.director}/stat") as file:
            if file.read().rpartition(")")[2].split()[:1] == ["Z"]:  # its parent has not noticed
                return True
        return not os.path.isdir(self.folder)  # noqa: PTH112

    def remove(self) -> None:
        """Delete the folder that nobody reads any more."""
        shutil.rmtree(self.folder, ignore_errors=True)
