"""A stitched kernel as a call that costs the host little: a program of short kernels waits for it.

The first call goes through Triton, which compiles and says which binary it took.  From then on a
function runs that was written for this kernel and device: memory for the results, then the binary
itself, by the addresses of the tensors.  How Triton hands arguments over is its own affair, so that
function has to give the first call's results again, bit by bit, before it takes over.  So has one
by a binary as another process would find it; if it does, that process need not ask Triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from nostall.attach.torch_compile.runtime import binary_cache as kept
from nostall.attach.torch_compile.store.records import KernelRecord, TensorRecord
from nostall.attach.warning import say_once
from nostall.fusion.codegen.runtime.kernel import ALIGNMENT_BYTES, align_tensor, launch_options

Call = Callable[[Sequence[Tensor]], list[Tensor]]
Functions = Callable[[], Sequence[Any]]
"""What Triton has compiled or would, for each launch; imported at the first call."""
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

ODD = ALIGNMENT_BYTES - 1
"""Bits of an address that are 0 where Triton may assume that it is aligned."""


class Launcher:
    """A kernel whose sizes are all known, on whichever device is current.  Nothing is checked.
    ``shared``: whether its binaries are sought where other processes leave theirs, and left."""

    def __init__(self, record: KernelRecord, functions: Functions, *, shared: bool = True) -> None:
        self._record, self._shared = record, shared
        self.inputs = [layout(tensor) for tensor in record.inputs]
        self.outputs = [layout(tensor) for tensor in record.outputs]
        self._made = list(self.outputs)
        for space in record.workspaces:
            assert isinstance(space.elements, int)  # all sizes are known
            self._made.append(((space.elements,), (1,), getattr(torch, space.dtype)))
        names = [f"p{at}" for at in range(len(self.inputs) + len(self.outputs))]
        names += [space.name for space in record.workspaces]
        self._functions, self._launches = functions, record.launches
        self._orders = [[names.index(a) for a in launch.arguments] for launch in record.launches]
        self._quick: dict[int, Call] = {}
        self._sought: set[int] = set()
        self._settled: set[int] = set()

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for inputs of exactly the shapes, strides and dtypes of :attr:`inputs`."""
        quick = self._quick.get(inputs[0].get_device()) or self._found(inputs[0])
        return self._first(inputs) if quick is None else quick(inputs)

    def warm(self) -> None:
        """Compile without a launch, so that no step waits for it.  Nothing is loaded onto a GPU:
        that could fall into somebody's capture."""
        dtypes = [dtype for _, _, dtype in (*self.inputs, *self._made)]
        for function, launch, order in self._each():
            binary = function.warmup(
                *(dtypes[at] for at in order),
                *launch.counts,
                grid=launch.grid,
                **launch_options(launch),
            )
            _warm_launch(binary)

    def _found(self, tensor: Tensor) -> Call | None:
        """The function by binaries that another process has left, sought once."""
        number = tensor.get_device()
        if not self._shared or number in self._sought or _watched() or _capturing():
            return None
        self._sought.add(number)
        found = kept.find(self._record, tensor.device)
        if found is None:
            return None
        self._settled.add(number)
        quick = self._quick[number] = self._written(found, tensor.device)
        return quick

    def _first(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """By Triton, which compiles where it has to."""
        device = inputs[0].device
        made = [_empty(one, device) for one in self._made]
        tensors = [*inputs, *made]
        binaries = [
            function[launch.grid](
                *(align_tensor(tensors[at]) if launch.aligned else tensors[at] for at in order),
                *launch.counts,
                **launch_options(launch),
            )
            for function, launch, order in self._each()
        ]
        results = made[: len(self.outputs)]
        # Triton interprets without a binary; one for other addresses is good for all, but slow.
        usable = None not in binaries and not any(x.data_ptr() & ODD for x in tensors)
        number = inputs[0].get_device()
        # What has taken over asks here for what it leaves to Triton.
        if usable and number not in self._settled and not (_watched() or _capturing()):
            quick = self._written(binaries, device)
            self._settled.add(number)
            if _gives(quick, inputs, results):
                self._quick[number] = quick
                if self._shared:
                    self._leave(binaries, inputs, results)
        return results

    def _leave(
        self, binaries: Sequence[Any], inputs: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """For other processes, if these binaries do the same as they would find them."""
        known, device = kept.told(binaries), inputs[0].device
        if known is None:
            return
        with contextlib.suppress(Exception):  # they ask Triton then, as this one did
            if _gives(self._written(kept.again(known), device), inputs, results):
                kept.keep(self._record, device, known)

    def _each(self) -> Any:
        return zip(self._functions(), self._launches, self._orders, strict=True)

    def _written(self, binaries: Sequence[Any], device: torch.device) -> Call:
        """The function for later calls, as text: loops over a kernel's tensors cost as much as all
        the rest."""
        given = [f"x{at}" for at in range(len(self.inputs))]
        made = [f"x{len(given) + at}" for at in range(len(self._made))]
        every = [*given, *made]
        lines = [f"def call(inputs):\n    {''.join(f'{x}, ' for x in given)} = inputs"]
        lines += [f"{x} = empty(*made_{x})" for x in made]
        lines += [f"a{x} = {x}.data_ptr()" for x in every]
        lines += [
            f"if ({' | '.join(f'a{x}' for x in every)}) & {ODD} or watched():",
            "    return first(inputs)",
            "stream = stream_of(device)",
        ]
        scope: dict[str, Any] = {
            **{f"made_{x}": layout for x, layout in zip(made, self._made, strict=True)},
            "empty": _quick_empty(device),
            "watched": _watched,
            "first": self._first,
            "stream_of": _stream_of,
            "device": device.index,
            "binaries": binaries,  # who drops one may unload it
        }
        launches = zip(binaries, self._launches, self._orders, strict=True)
        for at, (binary, launch, order) in enumerate(launches):
            scope |= {f"run_{at}": binary.run, f"function_{at}": binary.function}
            scope[f"packed_{at}"] = binary.packed_metadata
            arguments = [*(f"a{every[place]}" for place in order), *map(str, launch.counts)]
            lines.append(
                f"run_{at}({launch.grid[0]}, {launch.grid[1]}, 1, stream, function_{at}, "
                f"packed_{at}, None, None, None, {', '.join(arguments)})"
            )
        lines.append(f"return [{', '.join(made[: len(self.outputs)])}]")
        exec("\n    ".join(lines), scope)
        found: Call = scope["call"]
        return found


def _warm_launch(binary: Any) -> None:
    """Triton 3.6 hands arguments over by C that it writes for each signature, and has compiled at
    the first launch; what it has compiled it keeps on disk."""
    # How that is done is Triton's affair; a launch says what is wrong with it.
    with contextlib.suppress(Exception):
        driver.active.launcher_cls(binary.src, binary.metadata)


def _gives(quick: Call, inputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether a call gives these results, bit by bit."""
    pairs = zip(quick(inputs), wanted, strict=True)
    if all(torch.equal(_bytes(mine), _bytes(its)) for mine, its in pairs):
        return True
    say_once("a stitched kernel gives other results if not launched by Triton, so it is")
    return False


def _capturing() -> bool:
    """Whether this goes into a CUDA graph: nothing can be looked at then."""
    return torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def layout(tensor: TensorRecord) -> Layout:
    return tensor.shape, tensor.strides, getattr(torch, tensor.dtype)


def _empty(one: Layout, device: torch.device) -> Tensor:
    shape, strides, dtype = one
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _quick_empty(device: torch.device) -> Callable[..., Tensor]:
    """As Inductor's own code takes memory of the current device; the public way is slower."""
    kind = "_empty_strided_cuda" if device.type == "cuda" else "_empty_strided_cpu"
    found = getattr(torch._C._dynamo.guards, kind, None)
    return found or (lambda *one: _empty(one, device))


_stream_of: Callable[[int | None], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: 0
)


def _watched() -> bool:
    """Whether somebody wants to be told of launches (a profiler's hooks): Triton knows how."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if getattr(hook, "calls", hook):
            return True
    return False
