"""Generated source as something that can be called: imported from a file, launched on tensors."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nostall.core.errors import BadInput, MissingPart
from nostall.core.versions import TRITON_VERSIONS, supports_triton
from nostall.fusion.graph.dynamic_size import resized
from nostall.store.artefacts import Artefacts
from nostall.store.folder import home

if TYPE_CHECKING:
    from nostall.fusion.codegen.emit.program import Program
    from nostall.fusion.graph.graph import Node

ALIGNMENT_BYTES = 16
"""Bytes: where an address is a multiple of it Triton may say so to the compiler, and does."""


class BadTensor(BadInput):
    """A tensor does not have the shape, strides, dtype or device a kernel was made for."""


@dataclass(frozen=True)
class StitchedKernel:
    """A pattern as a function of tensors; ``file`` holds its source."""

    program: Program
    file: Path
    functions: tuple[Any, ...] = field(repr=False)

    def __call__(self, *inputs: Tensor, size: int | None = None) -> tuple[Tensor, ...]:
        """The outputs, on the device of the inputs.

        ``size`` is what varies, for graphs where something does; read off the inputs where it is
        not said.  Raises :class:`BadTensor` where the inputs are not those of ``program.inputs``.
        """
        if size is None:
            size = self.program.dynamic_size(inputs)
        self._check(inputs, size)
        device = inputs[0].device if inputs else torch.device("cuda")
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
        size: int | None = None,
    ) -> None:
        """Run the kernels on memory that is there; nothing is checked or allocated."""
        varying = self.program.graph.varying
        tensors = dict(workspaces)
        tensors.update(zip(self.program.nodes_by_argument, (*inputs, *outputs), strict=True))
        for function, launch in zip(self.functions, self.program.launches, strict=True):
            arguments = [tensors[name] for name in launch.arguments]
            if launch.aligned:
                arguments = [align_tensor(tensor) for tensor in arguments]
            counts = [resized(count, varying, size) for count in launch.counts]
            grid = tuple(resized(blocks, varying, size) for blocks in launch.grid)
            function[grid](*arguments, *counts, **launch_options(launch))

    def _check(self, inputs: Sequence[Tensor], size: int | None) -> None:
        if len(inputs) != len(self.program.inputs):
            raise BadTensor(
                f"got {len(inputs)} tensors; the kernel takes {len(self.program.inputs)}: "
                + ", ".join(str(self.program.graph[i]) for i in self.program.inputs)
            )
        for index, tensor in zip(self.program.inputs, inputs, strict=True):
            node = self.program.graph[index].resized(self.program.graph.varying, size)
            wanted = (node.shape, node.strides, getattr(torch, node.dtype))
            given = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
            # The stride of an axis of 1 or of an empty tensor means nothing.
            moves = [
                (a, b)
                for size, a, b in zip(node.shape, node.strides, tensor.stride(), strict=False)
                if size > 1
            ]
            fits = wanted[0] == given[0] and wanted[2] == given[2] and all(a == b for a, b in moves)
            if not fits or tensor.device != inputs[0].device:
                raise BadTensor(
                    f"input {node} got a tensor of shape, strides and dtype {given} on "
                    f"{tensor.device}; it takes {wanted}, all on one device; make another kernel "
                    "for other tensors"
                )


class LaunchLike(Protocol):
    """A launch, or the record of one."""

    @property
    def num_warps(self) -> int: ...

    @property
    def follows(self) -> bool: ...


def launch_options(launch: LaunchLike) -> dict[str, Any]:
    """How Triton is asked for a kernel on the current device: other options are other binaries."""
    import triton.language as tl

    # Triton's default for fused multiply-adds changes with its version.
    found = {"num_warps": launch.num_warps, "enable_fp_fusion": True}
    # As the kernel itself asks: one that does not wait must not begin early.
    if launch.follows and tl.target_info.cuda_capability_geq(9, 0):
        found["launch_pdl"] = True
    return found


def empty_tensor(node: Node, device: torch.device) -> Tensor:
    """Memory for a node's value, with its strides."""
    dtype: torch.dtype = getattr(torch, node.dtype)
    found: Tensor = torch.empty_strided(node.shape, node.strides, dtype=dtype, device=device)
    return found


def align_tensor(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it begins at an odd place: outputs, which are ours, never do."""
    if tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def load_kernel(program: Program, folder: Path | None = None) -> StitchedKernel:
    """Write the source into ``folder`` (the store's, where none is given) and import it.

    Files are named by their content; one that is there is checked, not trusted.
    """
    names = [launch.name for launch in program.launches]
    file, functions = load_source(program.source, names, folder)
    return StitchedKernel(program, file, functions)


def load_source(
    source: str, names: Sequence[str], folder: Path | None = None
) -> tuple[Path, tuple[Any, ...]]:
    """The file of a source as in :func:`load_kernel`, and the kernels of these names in it."""
    check_triton()
    artefacts = Artefacts(folder if folder is not None else home() / "fusion")
    name = artefacts.put(source.encode(), "py")
    artefacts.get(name, "py")
    module = _import_source(artefacts.path(name, "py"))
    return artefacts.path(name, "py"), tuple(getattr(module, one) for one in names)


@functools.cache
def _import_source(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"nostall_stitched_{path.stem[:16]}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def clear_source_cache() -> None:
    """Import every source anew: Triton keeps what it has compiled for one in memory."""
    _import_source.cache_clear()


@functools.cache
def check_triton() -> None:
    """Raises :class:`MissingPart` where there is no Triton, or one that is not known."""
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
