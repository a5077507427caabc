"""Reference results of a graph: the same program in higher precision, one operator at a time.

Dtypes that the tensors of a program have while the program runs on wider floats.

Operators that PyTorch has for narrow floats only, in wide floats.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from nostall.attach.torch_compile.measure.call import Call, with_history
from nostall.core.errors import one_line
from nostall.fusion.capture.memory import draws_random_numbers


class ProgramDtypes:
    """The dtype that each tensor of a wide run has in the program, by the tensor's memory."""

    def __init__(self, wide: torch.dtype) -> None:
        """``wide``: the dtype of all floats of the run that are narrower in the program."""
        self._wide = wide
        # Views share memory and dtype.  Autograd makes new tensors for saved ones, with the same
        # memory.  A weak reference keeps the address from being used for another memory.
        self._noted: dict[StorageWeakRef, torch.dtype | None] = {}
        self._fake = FakeTensorMode()

    def note(self, value: Tensor, dtype: torch.dtype | None) -> None:
        """Note the dtype that a wide tensor has in the program; None if it is not known."""
        self._noted[StorageWeakRef(value.untyped_storage())] = dtype

    def of(self, value: Tensor) -> torch.dtype | None:
        """The dtype of a tensor in the program; None if it is not known."""
        if value.dtype is not self._wide:
            return value.dtype
        return self._noted.get(StorageWeakRef(value.untyped_storage()), value.dtype)

    def note_results(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Note the dtypes that a call gives for operands in their dtypes in the program.

        ``args`` and ``kwargs`` are those of the program but for wide tensors.  Wide results are not
        known if an operand is not known, or if the operator has no rule for fake tensors.
        """
        leaves = list(enumerate(tree_leaves(results)))
        wide = [(at, x) for at, x in leaves if isinstance(x, Tensor) and x.dtype is self._wide]
        if not wide:
            return
        try:
            with self._fake, _without_logs():
                fake_args, fake_kwargs = tree_map(self._as_fake, (args, kwargs))
                expected = tree_leaves(func(*fake_args, **fake_kwargs))
        except Exception:  # operators without a rule fail in any way
            expected = []
        for at, value in wide:
            if expected:
                self.note(value, expected[at].dtype)
            elif StorageWeakRef(value.untyped_storage()) not in self._noted:
                self.note(value, None)

    def _as_fake(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        dtype = self.of(value)
        if dtype is None:
            raise LookupError("the dtype of an operand is not known")
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Suppress the tracebacks that PyTorch logs for operators without a rule for these dtypes.

    Logs of other threads stay.
    """
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


_is_quiet: ContextVar[bool] = ContextVar("fake_tensor_is_quiet", default=False)
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not _is_quiet.get())


_aten = torch.ops.aten


def grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``torch._grouped_mm``: one matrix product for each group.

    ``offs``: the ends of the groups along the axis that has no axis of groups beside it: rows of
    ``left`` (rows x depth, groups x depth x columns), columns of ``right``, or the depth of both,
    which gives groups x rows x columns. Rows and columns behind the last end, which PyTorch leaves
    undefined, are 0. Raises NotImplementedError for a bias, which PyTorch refuses, too.
    """
    if bias is not None:
        raise NotImplementedError("a grouped matrix product with a bias")
    if offs is None:
        return torch.bmm(left, right)
    ends = offs.tolist()
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if left.dim() == right.dim() == 2:
        return torch.stack([left[:, part] @ right[part] for part in parts])
    result = left.new_zeros(left.shape[-2], right.shape[-1])
    for group, part in enumerate(parts):
        if left.dim() == 2:
            result[part] = left[part] @ right[group]
        else:
            result[:, part] = left[group] @ right[:, part]
    return result


WIDE: Mapping[Any, Callable[..., Tensor]] = {_aten._grouped_mm.default: grouped_mm}
"""Functions on wide floats, by operator."""


_PRODUCTS = {_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten._grouped_mm}


class NoReference(Exception):
    """A program has no reference; the text says why: it draws random numbers, say."""


class WideMode(TorchDispatchMode):  # type: ignore[misc]
    """Runs every operator on floats of ``dtype``, and notes the longest sum.

    Casts to narrower floats do nothing. An operator that refuses wide floats and is not in
    :data:`WIDE` runs on operands of the dtypes that they have in the program, as it
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

    def copy(self, leaf: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of a wide leaf that may be changed in place; ``dtype``: that in the program."""
        copy = with_history(leaf)
        self._program.note(copy, dtype)
        return copy

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
    leaf = mode.widen(value.detach()).requires_grad_(value.requires_grad)
    return leaf if value.is_leaf else mode.copy(leaf, value.dtype)


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
