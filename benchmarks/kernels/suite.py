"""Kernels of the measured suite: problem sizes, and compiler configurations of each kernel.

The two kernels of SIP and the six of CuAsmRL have the problem sizes of the publications (few
blocks, long loops), and each of these kernels has one size that fills an H200. Kernels without a
tuned Triton source follow. Kernels with matrix products are in the suite twice: with Hopper's
warpgroup instructions (``wgmma``) and with warp-wide instructions (``mma``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness.schema import Instructions, Options, Size
from benchmarks.kernels.examples import EXAMPLES
from nostall.core import BadInput, LaunchSpec
from nostall.tuning.sources.kernel_file import import_file
from nostall.tuning.sources.ptx_source import load_ptx
from nostall.tuning.sources.source import Source, load_cubin
from nostall.tuning.sources.triton_source import compile_triton

_WITHOUT_WGMMA = "DISABLE_MMA_V3"
"""Environment variable that Triton reads when it compiles; it is not a compile option."""

Tile = tuple[int, ...]
Tiles = dict[Instructions, tuple[Tile, ...]]

_GEMM_SMALL: Tiles = {
    "wgmma": ((64, 32, 64), (64, 64, 64), (128, 32, 64), (64, 128, 64), (128, 64, 64)),
    "mma": ((32, 32, 64), (32, 64, 64), (64, 32, 64), (64, 64, 32), (64, 64, 64)),
}
_GEMM_LARGE: Tiles = {
    "wgmma": ((128, 128, 32), (128, 128, 64), (64, 256, 64), (128, 256, 64), (256, 128, 64)),
    "mma": ((64, 64, 64), (64, 128, 32), (128, 64, 32), (128, 128, 32), (128, 128, 64)),
}
# These kernels have two accumulators, so their tiles are half as large.
_GATED_LARGE: Tiles = {
    "wgmma": ((64, 128, 64), (128, 64, 64), (128, 128, 32), (128, 128, 64), (256, 64, 64)),
    "mma": ((64, 64, 32), (64, 64, 64), (64, 128, 32), (128, 64, 32), (128, 64, 64)),
}
_ATTENTION: Tiles = {
    "wgmma": ((64, 32), (64, 64), (128, 32), (128, 64), (128, 128)),
    "mma": ((32, 32), (64, 32), (64, 64), (128, 32), (128, 64)),
}


@dataclass(frozen=True)
class Entry:
    """One kernel at one problem size, and the compile options that its baseline tries."""

    kernel: str
    file: Path
    """Python file of a Triton kernel, or the cubin or PTX of a kernel of nvcc or Inductor."""
    problem: tuple[int, ...] = ()
    """Arguments of ``launch_KERNEL`` or ``launch`` in the Python file; empty for other files."""
    size: Size | None = None
    instructions: Instructions | None = None
    tiles: tuple[Tile | None, ...] = (None,)
    warps: tuple[int, ...] = (4,)
    stages: tuple[int, ...] = (3,)
    registers: tuple[int | None, ...] = (None,)

    @property
    def name(self) -> str:
        shape = f"-{'x'.join(map(str, self.problem))}" if self.problem else ""
        return self.kernel + shape + (f"@{self.instructions}" if self.instructions else "")

    @property
    def options(self) -> list[Options]:
        """All combinations that the baseline tries; none for a cubin and for PTX."""
        if not self.problem:
            return []
        combinations = product(self.tiles, self.warps, self.stages, self.registers)
        return [
            Options(tile=tile, num_warps=warps, num_stages=stages, maxnreg=registers)
            for tile, warps, stages, registers in combinations
        ]


def entries(inductor: Path | None = None) -> tuple[Entry, ...]:
    """The suite: published sizes, then sizes that fill the GPU, then cubins.

    ``inductor``: a folder that ``benchmarks.kernels.inductor`` wrote.
    """
    triton_entries = [*_matrix_kernels(), *_row_kernels()]
    order: dict[Size | None, int] = {"published": 0, "filling": 1}
    ranked = sorted(triton_entries, key=lambda entry: order[entry.size])
    cubins = [EXAMPLES / "nvcc" / f"{name}.sm_90.cubin" for name in ("transpose", "dot_product")]
    if inductor is not None:
        cubins += sorted(inductor.glob("*.cubin"))
    return (*ranked, *(Entry(file.name.partition(".")[0], file) for file in cubins))


def build(entry: Entry, options: Options | None = None) -> Source:
    """Compile one configuration for sm_90, or read the cubin or PTX if ``options`` is None.

    Raises BadInput if compilation fails or uses other matrix instructions than the entry's.
    """
    if options is None and entry.file.suffix == ".ptx":
        source = load_ptx(entry.file, None, _load_launch(entry.file), "sm_90")
        return replace(source, provenance=dict(source.provenance))
    if options is None:
        return load_cubin(entry.file, None, _load_launch(entry.file))
    with import_file(entry.file) as module:
        launch = _make_launch(module, entry, options)
    more = {} if options.maxnreg is None else {"maxnreg": options.maxnreg}
    with _require_instructions(entry.instructions):
        source = compile_triton(entry.file, entry.kernel, launch, "sm_90", options=more)
    if entry.instructions is not None:
        used = "wgmma" if "wgmma.mma_async" in (source.ptx or "") else "mma"
        if used != entry.instructions:
            raise BadInput(f"{entry.name}: this tile compiles to {used}; choose another one")
    # A plain dict can be pickled.
    return replace(source, provenance=dict(source.provenance))


def _matrix_kernels() -> Iterator[Entry]:
    """Kernels with matrix products, each with ``wgmma`` and with ``mma``."""
    table: tuple[tuple[str, Size, tuple[int, ...], Tiles], ...] = (
        ("gemm_leakyrelu", "published", (512, 512, 2048), _GEMM_SMALL),
        ("gemm_leakyrelu", "published", (1024, 1024, 1024), _GEMM_SMALL),
        ("batched_gemm", "published", (4, 512, 512, 2048), _GEMM_SMALL),
        ("fused_feedforward", "published", (512, 512, 2048), _GEMM_SMALL),
        ("fused_attention", "published", (1, 4, 2048, 64), _ATTENTION),
        ("flash_attention", "published", (1, 4, 8192, 64), _ATTENTION),
        ("gemm_leakyrelu", "filling", (4096, 4096, 4096), _GEMM_LARGE),
        ("batched_gemm", "filling", (16, 1024, 1024, 1024), _GEMM_LARGE),
        ("fused_feedforward", "filling", (2048, 4096, 2048), _GATED_LARGE),
        ("fused_attention", "filling", (4, 16, 2048, 64), _ATTENTION),
        ("flash_attention", "filling", (1, 32, 4096, 128), _ATTENTION),
    )
    for kernel, size, problem, tiles in table:
        attention = kernel.endswith("attention")
        for instructions, chosen in tiles.items():
            narrow = (2, 4) if instructions == "mma" and size == "published" else (4, 8)
            yield Entry(
                kernel=kernel,
                file=EXAMPLES / f"{kernel}.py",
                problem=problem,
                size=size,
                instructions=instructions,
                tiles=chosen,
                warps=narrow,
                stages=(2, 3, 4) if attention or size == "filling" else (3, 4, 5),
            )


def _row_kernels() -> Iterator[Entry]:
    """Kernels with one row for each block, so there is no tile to choose."""
    # Fewer warps are left out: Triton then compiles a long row for half a minute.
    table: tuple[tuple[str, Size, tuple[int, int], tuple[int, ...]], ...] = (
        ("softmax", "published", (1024, 16384), (4, 8, 16, 32)),
        ("rmsnorm", "published", (512, 512), (1, 2, 4, 8)),
        ("softmax", "filling", (4096, 8192), (4, 8, 16, 32)),
        ("rmsnorm", "filling", (4096, 8192), (4, 8, 16, 32)),
    )
    for kernel, size, problem, warps in table:
        yield Entry(
            kernel=kernel,
            file=EXAMPLES / f"{kernel}.py",
            problem=problem,
            size=size,
            warps=warps,
            registers=(None, 32, 48, 64, 96, 128),
        )


def _make_launch(module: Any, entry: Entry, options: Options) -> LaunchSpec:
    arguments: dict[str, Any] = {"warps": options.num_warps}
    if options.tile is not None:
        arguments |= {"tile": options.tile, "stages": options.num_stages}
    make = getattr(module, f"launch_{entry.kernel}", None) or module.launch
    try:
        launch: LaunchSpec = make(*entry.problem, **arguments)
    except ValueError as error:
        raise BadInput(f"{entry.name}: {error}; choose another tile") from error
    return launch


def _load_launch(file: Path) -> LaunchSpec:
    """The launch of a cubin or of PTX: NAME.json if a benchmark wrote it, else NAME.toml."""
    name = file.name.partition(".")[0]
    generated = file.parent / f"{name}.json"
    if generated.exists():
        return LaunchSpec.model_validate_json(generated.read_text())
    return LaunchSpec.from_toml(file.parent / f"{name}.toml")


@contextmanager
def _require_instructions(instructions: Instructions | None) -> Iterator[None]:
    """Let Triton use ``wgmma``, or only ``mma`` if ``instructions`` is ``"mma"``."""
    before = os.environ.pop(_WITHOUT_WGMMA, None)
    if instructions == "mma":
        os.environ[_WITHOUT_WGMMA] = "1"
    try:
        yield
    finally:
        os.environ.pop(_WITHOUT_WGMMA, None)
        if before is not None:
            os.environ[_WITHOUT_WGMMA] = before
