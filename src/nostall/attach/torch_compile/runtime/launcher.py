"""Launch a stitched kernel with little host time, past Triton's own launch.

The first call goes through Triton, which compiles the binaries.  Later calls run a Python function
that is generated for this kernel and device: it allocates the outputs and launches the binaries
with the addresses of the tensors.  Triton's argument protocol is internal, so the generated
function must reproduce the first call's results bit by bit before it is used.  If it also does so
with binaries that were loaded from Triton's cache, they are recorded, and other processes need no
Triton front end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from nostall.attach.torch_compile.runtime import binary_cache
from nostall.attach.torch_compile.store.records import KernelRecord, TensorRecord
from nostall.attach.warning import warn_once
from nostall.fusion.codegen.runtime.kernel import (
    ALIGNMENT_BYTES,
    align_tensor,
    launch_options,
    provide_scratch,
)

Call = Callable[[Sequence[Tensor]], list[Tensor]]
Functions = Callable[[], Sequence[Any]]
"""Returns the Triton function of each launch; imports the kernel's source when it is called."""
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""

COPIES_OF_CHANGED = 3
"""Copies of the tensors that a kernel changes, at most, while its direct call is checked."""
NO_MEMORY = RuntimeError
"""The class of errors that say that the GPU has no memory left.

PyTorch's allocator raises a subclass; an allocator of the user's that is plugged in raises this.
"""
MISALIGNED_BITS = ALIGNMENT_BYTES - 1
"""Address bits that are 0 if Triton may assume that the address is aligned."""


class Launcher:
    """Launches a kernel of static sizes on the current device; inputs are not checked."""

    def __init__(
        self,
        record: KernelRecord,
        functions: Functions,
        *,
        use_cache: bool = True,
        checked: dict[int, Sequence[Any]] | None = None,
    ) -> None:
        """``use_cache``: whether binaries are shared with other processes by the binary cache.

        ``checked``: binaries whose direct call was checked at another size of the same kernel, by
        index of the device; of a kernel of static sizes None.
        """
        self._record, self._use_cache = record, use_cache
        self._checked_binaries = checked
        self._mutated = record.mutated
        self.inputs = [tensor_layout(tensor) for tensor in record.inputs]
        self.outputs = [tensor_layout(tensor) for tensor in record.outputs]
        self._allocated = list(self.outputs)
        for space in record.workspaces:
            assert isinstance(space.elements, int)  # the sizes are static
            self._allocated.append(((space.elements,), (1,), getattr(torch, space.dtype)))
        names = [f"p{i}" for i in range(len(self.inputs) + len(self.outputs))]
        names += [space.name for space in record.workspaces]
        self._functions, self._launches = functions, record.launches
        self._needs_scratch = any(launch.needs_scratch for launch in record.launches)
        # For each launch: indices of its arguments in (inputs, outputs, workspaces).
        self._orders = [[names.index(a) for a in launch.arguments] for launch in record.launches]
        # By index of the device.
        self._direct_calls: dict[int, Call] = {}
        self._looked_up: set[int] = set()
        self._checked: set[int] = set()

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for inputs of exactly the layouts in :attr:`inputs`."""
        call = self._direct_calls.get(inputs[0].get_device()) or self._load_cached(inputs[0])
        return self._launch_by_triton(inputs) if call is None else call(inputs)

    def compile(self) -> None:
        """Compile the binaries without a launch and without loading them onto a GPU.

        Loading could happen while another thread captures a CUDA graph.
        """
        dtypes = [dtype for _, _, dtype in (*self.inputs, *self._allocated)]
        for function, launch, order in self._launch_items():
            binary = function.warmup(
                *(dtypes[i] for i in order),
                *launch.counts,
                grid=launch.grid,
                **launch_options(launch),
            )
            _compile_argument_parser(binary)

    def _load_cached(self, tensor: Tensor) -> Call | None:
        """The direct call with binaries that another process recorded; looked up once a device."""
        device = tensor.get_device()
        if self._checked_binaries is not None and device in self._checked_binaries:
            known = self._checked_binaries[device]
            self._checked.add(device)
            self._direct_calls[device] = self._generate_call(known, tensor.device)
            return self._direct_calls[device]
        if not self._use_cache or device in self._looked_up:
            return None
        if _has_launch_hooks() or _is_capturing():
            return None
        self._looked_up.add(device)
        binaries = binary_cache.load(self._record, tensor.device)
        if binaries is None:
            return None
        self._checked.add(device)
        call = self._direct_calls[device] = self._generate_call(binaries, tensor.device)
        return call

    def _launch_by_triton(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Launch by Triton, which compiles if necessary; then try the direct call."""
        device = inputs[0].device
        before = self._copies_for_check(inputs)
        allocated = [_empty(layout, device) for layout in self._allocated]
        tensors = [*inputs, *allocated]
        if self._needs_scratch:
            provide_scratch()
        binaries = [
            function[launch.grid](
                *(align_tensor(tensors[i]) if launch.aligned else tensors[i] for i in order),
                *launch.counts,
                **launch_options(launch),
            )
            for function, launch, order in self._launch_items()
        ]
        results = allocated[: len(self.outputs)]
        # Triton's interpreter returns no binaries.  Binaries for misaligned addresses would be
        # valid for all addresses, but slow.
        is_usable = None not in binaries and not any(
            x.data_ptr() & MISALIGNED_BITS for x in tensors
        )
        index = inputs[0].get_device()
        # A direct call falls back to this method in some cases, so each device is checked once.
        if is_usable and before is not None and index not in self._checked:
            call = self._generate_call(binaries, device)
            self._checked.add(index)
            check = _Check(inputs, before, results)
            # Without memory for the results of the check, Triton launches the kernel from now on.
            with contextlib.suppress(NO_MEMORY):
                if check.reproduces(call):
                    self._direct_calls[index] = call
                    if self._checked_binaries is not None and self._are_for_all_counts():
                        self._checked_binaries[index] = binaries
                    if self._use_cache:
                        self._record_binaries(binaries, device, check)
        return results

    def _copies_for_check(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Copies of what the kernel changes, to check a direct call; None if none is checked."""
        if not self._may_check(inputs):
            return None
        try:
            return [tensor.clone() for tensor in inputs[: self._mutated]]
        except NO_MEMORY:
            # The allocator has freed its cache for nothing; it would do so at each call.
            self._checked.add(inputs[0].get_device())
            return None

    def _may_check(self, inputs: Sequence[Tensor]) -> bool:
        """Whether a direct call is not checked yet, and can be.

        Tensors that the kernel changes are copied for the check; without memory for that, Triton
        launches the kernel.
        """
        if inputs[0].get_device() in self._checked or _has_launch_hooks() or _is_capturing():
            return False
        if any(x.data_ptr() & MISALIGNED_BITS for x in inputs):
            return False  # these binaries are not used directly, so copies would be made each time
        changed = inputs[: self._mutated]
        if not changed or not changed[0].is_cuda:
            return True
        needed = COPIES_OF_CHANGED * sum(x.numel() * x.element_size() for x in changed)
        return bool(needed < _free_bytes(changed[0].device))

    def _record_binaries(
        self, binaries: Sequence[Any], device: torch.device, check: _Check
    ) -> None:
        """Record the binaries, if loading them from Triton's cache reproduces the results."""
        record = binary_cache.describe(binaries)
        if record is None:
            return
        # Whatever Triton raises: other processes then go through Triton, as this one did.
        with contextlib.suppress(Exception):
            loaded = binary_cache.load_described(record)
            if check.reproduces(self._generate_call(loaded, device)):
                binary_cache.remember(self._record, device, record)

    def _are_for_all_counts(self) -> bool:
        """Whether Triton compiles no other binaries for other counts."""
        return all(
            getattr(each, "do_not_specialize", False)
            for function, launch, _ in self._launch_items()
            for each in function.params[len(function.params) - len(launch.counts) :]
        )

    def _launch_items(self) -> Any:
        return zip(self._functions(), self._launches, self._orders, strict=True)

    def _generate_call(self, binaries: Sequence[Any], device: torch.device) -> Call:
        """A function that launches the binaries.

        Its text is unrolled, because loops over a kernel's tensors cost as much as all the rest.
        """
        inputs = [f"x{i}" for i in range(len(self.inputs))]
        allocated = [f"x{len(inputs) + i}" for i in range(len(self._allocated))]
        tensors = [*inputs, *allocated]
        lines = [f"def call(inputs):\n    {''.join(f'{x}, ' for x in inputs)} = inputs"]
        lines += [f"{x} = empty(*layout_{x})" for x in allocated]
        lines += [f"a{x} = {x}.data_ptr()" for x in tensors]
        lines += [
            f"if ({' | '.join(f'a{x}' for x in tensors)}) & {MISALIGNED_BITS} "
            "or has_launch_hooks():",
            "    return launch_by_triton(inputs)",
            "stream = current_stream(device)",
            *(["provide_scratch()"] if self._needs_scratch else []),
        ]
        layouts = zip(allocated, self._allocated, strict=True)
        scope: dict[str, Any] = {
            **{f"layout_{x}": layout for x, layout in layouts},
            "empty": _fast_empty(device),
            "has_launch_hooks": _has_launch_hooks,
            "launch_by_triton": self._launch_by_triton,
            "current_stream": _current_stream,
            "provide_scratch": provide_scratch,
            "device": device.index,
            "binaries": binaries,  # Triton may unload a binary without references
        }
        launches = zip(binaries, self._launches, self._orders, strict=True)
        for i, (binary, launch, order) in enumerate(launches):
            scope |= {f"run_{i}": binary.run, f"function_{i}": binary.function}
            scope[f"packed_{i}"] = binary.packed_metadata
            arguments = [*(f"a{tensors[place]}" for place in order), *map(str, launch.counts)]
            lines.append(
                f"run_{i}({launch.grid[0]}, {launch.grid[1]}, 1, stream, function_{i}, "
                f"packed_{i}, None, None, None, {', '.join(arguments)})"
            )
        lines.append(f"return [{', '.join(allocated[: len(self.outputs)])}]")
        exec("\n    ".join(lines), scope)
        call: Call = scope["call"]
        return call


def _compile_argument_parser(binary: Any) -> None:
    """Make Triton 3.6 compile the C code that passes arguments of this signature.

    Triton would compile it at the first launch; the result is kept on disk.
    """
    # Triton's internals may differ; the launch reports what is wrong.
    with contextlib.suppress(Exception):
        driver.active.launcher_cls(binary.src, binary.metadata)


@dataclass(frozen=True)
class _Check:
    """The outcome of a launch by Triton, which a direct call must reproduce bit by bit."""

    # As they are after the launch.
    inputs: Sequence[Tensor]
    # What the launch has changed, as it was.
    before: Sequence[Tensor]
    results: Sequence[Tensor]

    def reproduces(self, call: Call) -> bool:
        """Whether a direct call has the same results and changes; warns if it has not."""
        changed = [tensor.clone() for tensor in self.before]
        results = call([*changed, *self.inputs[len(changed) :]])
        expected = [*self.results, *self.inputs[: len(changed)]]
        pairs = zip([*results, *changed], expected, strict=True)
        if all(torch.equal(_bytes(result), _bytes(wanted)) for result, wanted in pairs):
            return True
        warn_once(
            "a stitched kernel returns other results if it is launched directly, so Triton "
            "launches it"
        )
        return False


def _free_bytes(device: torch.device) -> int:
    """Memory of a GPU that PyTorch can allocate: free memory, and what its allocator holds unused.

    A part of the latter may be in pieces that are too small.
    """
    free: int = torch.cuda.mem_get_info(device)[0]
    try:
        stats = torch.cuda.memory_stats(device)
    except RuntimeError:  # an allocator that the user's process has plugged in has no statistics
        return free
    held, used = (stats.get(f"{x}_bytes.all.current", 0) for x in ("reserved", "allocated"))
    return free + int(held - used)


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream: nothing can be checked then."""
    return torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def tensor_layout(tensor: TensorRecord) -> Layout:
    return tensor.shape, tensor.strides, getattr(torch, tensor.dtype)


def _empty(layout: Layout, device: torch.device) -> Tensor:
    shape, strides, dtype = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _fast_empty(device: torch.device) -> Callable[..., Tensor]:
    """The allocation function of Inductor's generated code, which is faster than the public one.

    It allocates on the current device.
    """
    name = "_empty_strided_cuda" if device.type == "cuda" else "_empty_strided_cpu"
    function = getattr(torch._C._dynamo.guards, name, None)
    return function or (lambda *layout: _empty(layout, device))


_current_stream: Callable[[int | None], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: 0
)


def _has_launch_hooks() -> bool:
    """Whether launch hooks are registered, as a profiler does.  Only Triton's launch calls them."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if getattr(hook, "calls", hook):
            return True
    return False
