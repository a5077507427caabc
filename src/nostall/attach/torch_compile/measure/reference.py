"""Reference results of a graph: the same program in higher precision, one operator at a time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from nostall.attach.torch_compile.measure.call import Call
from nostall.attach.torch_compile.measure.program_dtypes import ProgramDtypes
from nostall.attach.torch_compile.measure.wide_products import WIDE
from nostall.core.errors import one_line
from nostall.fusion.capture.memory import draws_random_numbers

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten._grouped_mm}


class NoReference(Exception):
    """A program has no reference; the text says why: it draws random numbers, say."""


class WideMode(TorchDispatchMode):  # type: ignore[misc]
    """Runs every operator on floats of ``dtype``, and notes the longest sum.

    Casts to narrower floats do nothing. An operator that refuses wide floats and is not in
    :data:`~.wide_products.WIDE` runs on operands of the dtypes that they have in the program, as it
    does in both versions. Raises :class:`NoReference` for random numbers, which would differ from
    those of compiled code, for bits that are read as another dtype, and if such dtypes are not
    known.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        # Terms of the longest sum so far.
        self.longest = 1
        self._program = ProgramDtypes(dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_random_numbers(func, args, kwargs or {}):
            raise NoReference("it draws random numbers")
        if func is _aten.view.dtype:
            raise NoReference("it reads bits as another dtype")
        given = args, kwargs or {}
        if func._schema.is_mutable:
            result = func(*args, **given[1])
        else:
            args, kwargs = tree_map(self.widen, given)
            try:
                result = WIDE.get(func, func)(*args, **kwargs)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except (RuntimeError, TypeError):
                args, kwargs = tree_map(self._as_in_program, given)
                if not _has_other_dtypes(given, (args, kwargs)):
                    raise
                result = tree_map(self.widen, func(*args, **kwargs))
        self._program.note_results(func, *given, result)
        self._note_sum(func.overloadpacket, args, result)
        return result

    def widen(self, value: Any) -> Any:
        """A tensor with wide floats, or a wide dtype in place of a narrower one."""
        if isinstance(value, torch.dtype):
            return self.dtype if self._is_narrow(value) else value
        if not isinstance(value, Tensor) or not self._is_narrow(value.dtype):
            return value
        wide = value.to(self.dtype)
        self._program.note(wide, value.dtype)
        return wide

    def _as_in_program(self, value: Any) -> Any:
        """A tensor in the dtype that it has in the program."""
        if not isinstance(value, Tensor):
            return value
        dtype = self._program.of(value)
        if dtype is None:
            raise NoReference("an operator refuses wide floats, and its operands' dtypes are lost")
        return value.to(dtype)

    def _is_narrow(self, dtype: torch.dtype) -> bool:
        return bool(dtype.is_floating_point and dtype.itemsize < self.dtype.itemsize)

    def _note_sum(self, packet: Any, args: Any, result: Any) -> None:
        tensors = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
        first = next((x for x in tree_leaves(result) if isinstance(x, Tensor)), None)
        if first is None or not tensors or not first.numel():
            return
        if packet in _PRODUCTS:
            right = [x for x in tensors if x.dim() > 1][-1]  # behind it: ends of groups
            self.longest = max(self.longest, right.shape[-2])
        else:
            terms = max(x.numel() for x in tensors) // first.numel()
            self.longest = max(self.longest, terms)


def _has_other_dtypes(before: Any, after: Any) -> bool:
    pairs = zip(tree_leaves(before), tree_leaves(after), strict=True)
    return any(isinstance(a, Tensor) and a.dtype is not b.dtype for a, b in pairs)


@dataclass(frozen=True)
class Reference:
    """Results and gradients of a program in higher precision."""

    results: list[Tensor]
    gradients: list[Tensor | None]
    # Arguments that the call mutates, by index.
    mutated: dict[int, Tensor]
    dtype: torch.dtype
    # Terms of the longest sum of the program.
    longest_sum: int = field(default=1)

    @property
    def values(self) -> list[Tensor | None]:
        """Results, mutated arguments by index, and gradients."""
        mutated = [self.mutated[index] for index in sorted(self.mutated)]
        return [*self.results, *mutated, *self.gradients]


def wide_reference(
    run: Callable[[Callable[..., Any], list[Any], list[Tensor] | None], Any],
    program: Callable[..., Any],
    call: Call,
    seeds: list[Tensor],
) -> Reference:
    """The reference of a call in fp64, or in fp32 if fp64 does not fit into memory.

    ``run`` runs a program forward and backward. Raises :class:`NoReference` if the program cannot
    run in wide floats, for example because it calls kernels for narrow dtypes or draws random
    numbers.
    """
    for dtype in (torch.float64, torch.float32):
        with contextlib.suppress(torch.OutOfMemoryError):
            return _reference(run, program, call, seeds, dtype)
        torch.cuda.empty_cache()
    raise NoReference("fp32 does not fit into memory")


def _reference(
    run: Any, program: Callable[..., Any], call: Call, seeds: list[Tensor], dtype: torch.dtype
) -> Reference:
    mode = WideMode(dtype)
    args = [_wide_leaf(mode, value) for value in call.fresh_args()]
    wide_seeds = [mode.widen(seed) for seed in seeds]
    try:
        with mode, _exact_products():
            outcome = run(program, args, wide_seeds or None)
    except (torch.OutOfMemoryError, NoReference):
        raise
    except Exception as error:  # user code and operators may refuse wide floats in any way
        raise NoReference(one_line(error)) from error
    mutated = {index: args[index].detach() for index in call.mutated}
    return Reference(outcome.results, outcome.gradients, mutated, dtype, mode.longest)


def _wide_leaf(mode: WideMode, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return mode.widen(value.detach()).requires_grad_(value.requires_grad)


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Matrix products of fp32 without TF32.

    The setting is part of PyTorch's cache keys, and setting it to its own value changes it there.
    """
    precision = torch.get_float32_matmul_precision()
    if precision == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def rounding_of_sums(dtype: torch.dtype, terms: int) -> float:
    """Errors that rounding explains, in rounding errors of a result's dtype.

    One for the result itself, and that of a sum of ``terms`` numbers in fp32, whose errors grow
    with the square root of their count (Higham, Accuracy and Stability, section 2.8).
    """
    eps = float(torch.finfo(dtype).eps)
    return 1.0 + math.sqrt(terms) * float(torch.finfo(torch.float32).eps) / eps
