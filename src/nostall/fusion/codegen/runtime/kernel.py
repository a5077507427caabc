"""Stitched kernels at run time: import generated source from a file and launch it on tensors."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nostall.core.errors import BadInput, MissingPart
from nostall.core.versions import TRITON_VERSIONS, supports_triton
from nostall.fusion.graph.dynamic_size import Size, resized
from nostall.store.artefacts import Artefacts
from nostall.store.folder import home

if TYPE_CHECKING:
    from nostall.fusion.codegen.emit.program import Program
    from nostall.fusion.graph.graph import Node

ALIGNMENT_BYTES = 16
"""Alignment that Triton specializes pointer arguments for."""


class BadTensor(BadInput):
    """A tensor does not have the shape, strides, dtype or device that a kernel requires."""


@dataclass(frozen=True)
class StitchedKernel:
    """The kernels of one pattern as a function of tensors."""

    program: Program
    file: Path  # holds the source
    functions: tuple[Any, ...] = field(repr=False)  # Triton or Gluon kernels, one for each launch

    def __call__(
        self, *inputs: Tensor, size: Size | None = None, device: torch.device | None = None
    ) -> tuple[Tensor, ...]:
        """Allocate the outputs on the device of the inputs, run the kernels and return the outputs.

        ``size``: the current dynamic sizes, if the graph has any; by default they are read from the
        shapes of the inputs.  ``device``: where a kernel without inputs runs; by default on the
        GPU.  Raises :class:`BadTensor` if the inputs do not match
        ``program.inputs``.
        """
        if size is None:
            size = self.program.dynamic_size(inputs)
        self._check(inputs, size)
        device = inputs[0].device if inputs else device or torch.device("cuda")
        graph = self.program.graph
        outputs = tuple(
            empty_tensor(graph[index].resized(graph.varying, size), device)
            for index in self.program.outputs
        )
        workspaces = {
            space.name: torch.empty(
                resized(space.elements, graph.varying, size),
                dtype=getattr(torch, space.dtype),
                device=device,
            )
            for space in self.program.workspaces
        }
        self.launch(inputs, outputs, workspaces, size)
        return outputs

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        workspaces: Mapping[str, Tensor],
        size: Size | None = None,
    ) -> None:
        """Run the kernels on existing tensors, without checks.

        Allocates memory only to copy an input that is not aligned.
        """
        varying = self.program.graph.varying
        tensors = dict(workspaces)
        tensors.update(zip(self.program.nodes_by_argument, (*inputs, *outputs), strict=True))
        for function, launch in zip(self.functions, self.program.launches, strict=True):
            arguments = [tensors[name] for name in launch.arguments]
            if launch.aligned:
                arguments = [align_tensor(tensor) for tensor in arguments]
            counts = [resized(count, varying, size) for count in launch.counts]
            grid = tuple(resized(blocks, varying, size) for blocks in launch.grid)
            if launch.needs_scratch:
                provide_scratch()
            function[grid](*arguments, *counts, **launch_options(launch))

    def _check(self, inputs: Sequence[Tensor], size: Size | None) -> None:
        if len(inputs) != len(self.program.inputs):
            raise BadTensor(
                f"got {len(inputs)} tensors; the kernel takes {len(self.program.inputs)}: "
                + ", ".join(str(self.program.graph[i]) for i in self.program.inputs)
            )
        for index, tensor in zip(self.program.inputs, inputs, strict=True):
            node = self.program.graph[index].resized(self.program.graph.varying, size)
            required = (node.shape, node.strides, getattr(torch, node.dtype))
            actual = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
            # The stride of an axis with at most one element is arbitrary.
            has_strides = all(
                n <= 1 or a == b
                for n, a, b in zip(node.shape, node.strides, tensor.stride(), strict=False)
            )
            matches = has_strides and required[::2] == actual[::2]
            if not matches or tensor.device != inputs[0].device:
                raise BadTensor(
                    f"input {node} got a tensor of shape, strides and dtype {actual} on "
                    f"{tensor.device}; the kernel takes {required}, with all inputs on one device; "
                    "generate another kernel for other tensors"
                )


class LaunchLike(Protocol):
    """The launch options of a kernel: a launch, or a stored record of one."""

    @property
    def num_warps(self) -> int: ...

    @property
    def follows(self) -> bool: ...

    @property
    def num_stages(self) -> int: ...


def launch_options(launch: LaunchLike) -> dict[str, Any]:
    """Triton's keyword arguments for a launch on the current GPU.

    Different options compile to different binaries.
    """
    import triton.language as tl

    # The default of enable_fp_fusion depends on the version of Triton.
    # Kernels with assertions are compiled with Triton's option debug, which would also check each
    # sum of integers.
    options = {
        "num_warps": launch.num_warps,
        "enable_fp_fusion": True,
        "sanitize_overflow": False,
    }
    if launch.num_stages:
        options["num_stages"] = launch.num_stages
    # The kernel source has the same condition for its wait instruction.  A kernel without the wait
    # must not start before the previous kernel ends.
    if launch.follows and tl.target_info.cuda_capability_geq(9, 0):
        options["launch_pdl"] = True
    return options


def provide_scratch() -> None:
    """Let Triton allocate the scratch memory of launches in this thread by PyTorch.

    Triton keeps its allocator for each thread, and backward passes run in threads of their own. An
    allocator that the program has set stays.
    """
    import triton
    from triton.runtime import _allocation

    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        triton.set_allocator(_allocate_scratch)


def _allocate_scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory that the current stream may reuse behind the launch; PyTorch's is aligned enough."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def empty_tensor(node: Node, device: torch.device) -> Tensor:
    """An uninitialized tensor with the shape, strides and dtype of a node."""
    dtype: torch.dtype = getattr(torch, node.dtype)
    tensor: Tensor = torch.empty_strided(node.shape, node.strides, dtype=dtype, device=device)
    return tensor


def align_tensor(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it if its address is not aligned.

    Only inputs can be unaligned: outputs and workspaces come from PyTorch's allocator.
    """
    if tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def load_kernel(program: Program, folder: Path | None = None) -> StitchedKernel:
    """Write a program's source to ``folder`` (by default that of the store) and run it.

    A file's name is the hash of its content.  The file is there for the user and for profilers:
    what runs is ``source`` itself.
    """
    names = [launch.name for launch in program.launches]
    file, functions = load_source(program.source, names, folder)
    return StitchedKernel(program, file, functions)


def load_source(
    source: str, names: Sequence[str], folder: Path | None = None
) -> tuple[Path, tuple[Any, ...]]:
    """Write and run a source as in :func:`load_kernel`; returns its file and its kernels."""
    check_triton()
    artefacts = Artefacts(folder if folder is not None else home() / "fusion")
    name = artefacts.put(source.encode(), "py")
    module = _run_source(artefacts.path(name, "py"), source)
    return artefacts.path(name, "py"), tuple(getattr(module, kernel) for kernel in names)


@functools.cache
def _run_source(path: Path, source: str) -> ModuleType:
    """The module of a source, as if it were imported from ``path``.

    An import would run a bytecode file beside the source, whose content nobody has checked.
    """
    lines = source.splitlines(keepends=True)
    # Triton reads the source of a kernel by ``inspect``.  An entry without a time is not refreshed
    # from the file.
    linecache.cache[str(path)] = (len(source), None, lines, str(path))
    module = ModuleType(f"nostall_stitched_{path.stem[:16]}")
    module.__file__ = str(path)
    exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    return module


def clear_source_cache() -> None:
    """Clear the cache of imported sources, so that they are imported again.

    Triton keeps the binaries of an imported kernel in memory; a new import drops them.
    """
    _run_source.cache_clear()


@functools.cache
def check_triton() -> None:
    """Raises :class:`MissingPart` if Triton is missing or its version is not supported."""
    allowed = f"{TRITON_VERSIONS[0]} to {TRITON_VERSIONS[-1]}"
    try:
        import triton
    except ImportError as error:
        raise MissingPart(
            f"Triton cannot be imported ({error}); stitched kernels need Triton {allowed}: "
            "pip install 'nostall[triton]'"
        ) from error
    if not supports_triton(triton.__version__):
        raise MissingPart(
            f"Triton {triton.__version__} is not supported; stitched kernels work with {allowed}: "
            "pip install 'nostall[triton]'"
        )
