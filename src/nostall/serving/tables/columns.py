"""Columns of the task tables, as constants that kernels and printers share."""

from __future__ import annotations

SEQUENCE = 0
"""Sequence of the batch (all tables)."""
QUERY_START = 1
"""First query token within the sequence (tasks, reductions)."""
QUERY_COUNT = 2
"""Query tokens of the tile (tasks, reductions)."""
KV_START = 3
"""First key of a unit."""
KV_END = 4
"""Key behind the last key of a unit; at most the position of its last query token + 1."""
KV_HEAD = 5
"""KV head of a unit."""
TILE = 6
"""Index of a unit's tile height in the tile set."""
PARTIAL = 7
"""First scratch row of a unit, or -1 if it writes the result itself."""
TASK_COLUMNS = 8

REDUCTION_KV_HEAD = 3
"""KV head of a reduction."""
FIRST_ROW = 4
"""First scratch row of a reduction's first split."""
SPLITS = 5
"""Splits of a reduction, contiguous and in the order of their keys."""
REDUCTION_COLUMNS = 6

UNITS = 0
"""Count of units."""
REDUCTIONS = 1
"""Count of reductions."""
SCRATCH_ROWS = 2
"""Count of scratch rows."""
PROGRAMS = 3
"""Count of programs that have a range of units."""
COUNTS = 4

TASK_NAMES = ("sequence", "start", "tokens", "kv start", "kv end", "head", "tile", "partial")
REDUCTION_NAMES = ("sequence", "start", "tokens", "head", "first row", "splits")
TOKEN_NAMES = ("stage", "sequence", "start", "tokens", "kv length", "tile")
