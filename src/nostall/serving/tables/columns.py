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
"""First scratch row of a unit; -1: it writes the result itself; below: a shared prefix."""
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
PREFIX_ROWS = 4
"""Count of rows of ``prefix_rows``: the query tokens of a batch with a shared prefix, else 0."""
SAVED_NS = 5
"""Time of each program that shared prefixes save, by the costs of units; -1: a batch whose prefixes
exceed the capacity, so that it is built without them."""
COUNTS = 6

PREFIX_QUERY = 0
"""Row of a query token in the packed queries (prefix_rows)."""
PREFIX_FIRST_ROW = 1
"""Scratch row of its first query head, for KV head 0 and split 0; -1: it shares nothing."""
PREFIX_SPLIT_ROWS = 2
"""Scratch rows from one split to the next."""
PREFIX_HEAD_ROWS = 3
"""Scratch rows from one KV head to the next."""
PREFIX_COLUMNS = 4
FIRST_PREFIX_SPLIT = -2
"""PARTIAL of a unit of split 0 of shared prefixes; split i of them has this minus i."""

TASK_NAMES = ("sequence", "start", "tokens", "kv start", "kv end", "head", "tile", "partial")
PREFIX_NAMES = ("query row", "first row", "split rows", "head rows")
REDUCTION_NAMES = ("sequence", "start", "tokens", "head", "first row", "splits")
TOKEN_NAMES = ("stage", "sequence", "start", "tokens", "kv length", "shared", "tile")
