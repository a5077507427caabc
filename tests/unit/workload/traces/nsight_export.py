"""Builder for small exports of Nsight Systems; times are microseconds."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROCESS = 5 << 24 | 1 << 56
"""A global process id; the bits above the process are those of the machine."""
THREAD = PROCESS | 77
_STRINGS = "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL)"
Rows = Mapping[str, list[dict[str, Any]]]


class Export:
    """Rows of an export; each table gets the columns that its rows have."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.strings: dict[str, int] = {}

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def add(self, table: str, start: float, duration: float, **fields: Any) -> None:
        row = {"start": int(start * 1000), "end": int((start + duration) * 1000), **fields}
        self.tables.setdefault(table, []).append(row)

    def launch(self, start: float, correlation: int, process: int = PROCESS) -> None:
        name = self.string("cudaLaunchKernel_v7000")
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", start, 5, globalTid=process | 77,
                 correlationId=correlation, nameId=name)  # fmt: skip

    def kernel(
        self, name: str, start: float, duration: float, correlation: int, process: int = PROCESS
    ) -> None:
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", start, duration, globalPid=process, deviceId=0,
                 contextId=1, streamId=7, correlationId=correlation,
                 demangledName=self.string(name), shortName=self.string("short"))  # fmt: skip

    def range(self, name: str, start: float, duration: float, **fields: Any) -> None:
        row = {"eventType": 59, "text": None, "textId": self.string(name), "globalTid": THREAD}
        self.add("NVTX_EVENTS", start, duration, **{**row, **fields})

    def write(self, path: Path) -> Path:
        with sqlite3.connect(path) as database:
            database.execute(_STRINGS)
            database.executemany(
                "INSERT INTO StringIds (value, id) VALUES (?, ?)", self.strings.items()
            )
            for table, rows in self.tables.items():
                names = list(rows[0])
                columns = ", ".join(f'"{name}"' for name in names)
                database.execute(f"CREATE TABLE {table} ({columns})")
                marks = ", ".join("?" * len(names))
                database.executemany(
                    f"INSERT INTO {table} VALUES ({marks})",
                    [[row[name] for name in names] for row in rows],
                )
        database.close()
        return path
