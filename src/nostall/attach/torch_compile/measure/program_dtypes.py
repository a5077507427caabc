"""Dtypes that the tensors of a program have while the program runs on wider floats."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map


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
