"""Builds from block tables with little host time, past Triton's own launcher.

Triton's launcher computes the key of a kernel from all arguments and constants at each launch. A
builder's kernels differ in a few addresses only, so their binaries are kept and launched with the
arguments that Triton passes. This protocol is internal: :meth:`DirectBuild.of` lets both launchers
build the same batch, and compares every word that they wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

from nostall.serving.tables.device import DeviceBuilder, KernelLaunch, Prefixes

RELEASES = ("3.6", "3.7", "3.8", "3.9")
"""Versions of Triton whose launcher takes arguments as :class:`DirectBuild` passes them."""
MISALIGNED_BITS = 15
"""Address bits that are 0 if Triton may assume that the address is aligned."""
_FILL = 0x55
"""Content of the tensors before each of the two builds that are compared."""
_log = logging.getLogger("nostall")


class DirectBuild:
    """Launches the three kernels of a build from block tables of one page size."""

    def __init__(self, builder: DeviceBuilder, page_size: int, binaries: tuple[Any, Any, Any]):
        """``binaries``: what Triton's launches of the kernels returned."""
        # The addresses below stay valid as long as the builder's tensors live.
        self._builder = builder
        self._device = builder.tables.counts.get_device()
        self._device_now: Callable[[], int] = driver.active.get_current_device
        self._stream_of: Callable[[int], int] = driver.active.get_current_stream
        leaders, forest, tables = _launches(builder, page_size)
        self._find_leaders = _direct(leaders, binaries[0], varying=6)
        self._arrange_forest = _direct(forest, binaries[1], varying=2)
        self._write_tables = _direct(tables, binaries[2], varying=3)

    @staticmethod
    def of(
        builder: DeviceBuilder, query_starts: Any, kv_lengths: Any, prefixes: Prefixes
    ) -> DirectBuild | None:
        """A direct build for the builder; None, and a line in the log, if there is none.

        The batch is built by both launchers. It has sequences, and a block table. The builder's
        sums over all builds are lost.
        """
        if not builder.least_prefix:
            return None
        if ".".join(triton.__version__.split(".")[:2]) not in RELEASES:
            _log.info("nostall: Triton %s launches the table builder itself", triton.__version__)
            return None
        try:
            return _checked(builder, query_starts, kv_lengths, prefixes)
        except Exception as error:  # Whatever Triton's internals raise, it launches itself.
            _log.warning("nostall: Triton launches the table builder itself: %s", error)
            return None

    def __call__(self, query_starts: Any, kv_lengths: Any, block_table: Any) -> bool:
        """Launch a build on the current stream; False if Triton's launcher must do it.

        The batch has at least one sequence, and at most those of the capacity.
        """
        starts, lengths, pages = (
            query_starts.data_ptr(),
            kv_lengths.data_ptr(),
            block_table.data_ptr(),
        )
        device = self._device
        if (
            (starts | lengths | pages) & MISALIGNED_BITS
            or not (query_starts.dtype is kv_lengths.dtype is block_table.dtype is torch.int32)
            or kv_lengths.get_device() != device
            or self._device_now() != device
            or _has_launch_hooks()
        ):
            return False
        count = kv_lengths.shape[0]
        columns, stride = block_table.shape[1], block_table.stride(0)
        stream = self._stream_of(device)
        self._find_leaders(count, stream, pages, starts, lengths, count, columns, stride)
        self._arrange_forest(count, stream, starts, count)
        self._write_tables(self._builder.grid, stream, starts, lengths, count)
        return True


def _launches(
    builder: DeviceBuilder, page_size: int
) -> tuple[KernelLaunch, KernelLaunch, KernelLaunch]:
    least = builder.least_prefix
    return builder.leaders_launch(page_size), builder.forest_launch(), builder.tables_launch(least)


def _direct(launch: KernelLaunch, binary: Any, varying: int) -> Callable[..., None]:
    """A function that launches a binary: grid, stream, and the arguments that vary."""
    names = launch.function.arg_names
    behind = varying + len(launch.fixed)
    constants = [launch.constants[name] for name in names[behind:]]
    fixed = [x.data_ptr() if torch.is_tensor(x) else x for x in launch.fixed]
    run, function, packed = binary.run, binary.function, binary.packed_metadata
    tail = (*fixed, *constants)

    def call(grid: int, stream: int, *arguments: int) -> None:
        run(grid, 1, 1, stream, function, packed, None, None, None, *arguments, *tail)

    return call


def _checked(
    builder: DeviceBuilder, query_starts: Any, kv_lengths: Any, prefixes: Prefixes
) -> DirectBuild | None:
    """The direct build if it writes what Triton's launches write."""
    table, count = prefixes.block_table, len(kv_lengths)
    leaders, forest, tables = _launches(builder, prefixes.page_size)
    _fill(builder)
    strides = count, table.shape[1], table.stride(0)
    binaries = (
        leaders(count, table, query_starts, kv_lengths, *strides),
        forest(count, query_starts, count),
        tables(builder.grid, query_starts, kv_lengths, count),
    )
    if None in binaries:  # Triton's interpreter compiles nothing.
        return None
    wanted = [tensor.clone() for tensor in (*builder.written, builder.state)]
    _fill(builder)
    direct = DirectBuild(builder, prefixes.page_size, binaries)
    is_launched = direct(query_starts, kv_lengths, table)
    found = (*builder.written, builder.state)
    if is_launched and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
        return direct
    _log.warning("nostall: Triton launches the table builder itself: other tables without it")
    return None


def _fill(builder: DeviceBuilder) -> None:
    """Give all tensors of the builder one content, so that rows behind the counts compare."""
    for tensor in (*builder.written, builder.state):
        tensor.fill_(_FILL)


def _has_launch_hooks() -> bool:
    """Whether launch hooks are registered, as a profiler does; only Triton's launcher calls them"""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if getattr(hook, "calls", hook):
            return True
    return False
