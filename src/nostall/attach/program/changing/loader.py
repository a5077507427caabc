"""Worker processes, pinned memory and copies that do not wait, for the program's ``DataLoader``.

They are set when a loader is made, so that each try is a start of the program.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from types import ModuleType
from typing import Any

from nostall.attach.program.shadow import map_tensors

KIND = "loader"
"""Kind of this change."""
VALUE = re.compile(r"workers=([1-9]|1\d)(,pinned)?")
"""Its values."""
_MARK = "_nostall_version"


class Loaders:
    """Changes the loaders that a program makes."""

    def __init__(self, value: str) -> None:
        """``value``: as :data:`VALUE`."""
        found = VALUE.fullmatch(value)
        assert found is not None
        self.workers, self.pinned = int(found[1]), bool(found[2])
        self._batch: list[Any] = []
        """Tensors of the last batch, in pinned memory."""

    def install(self, module: ModuleType) -> None:
        """Change the loaders of ``module``, ``torch.utils.data.dataloader``."""
        loader, init = module.DataLoader, module.DataLoader.__init__
        signature = inspect.signature(init)

        @functools.wraps(init)
        def made(own: Any, dataset: Any, *args: Any, **options: Any) -> None:
            given = signature.bind(own, dataset, *args, **options)
            # Each worker would read all of an iterable data set.
            is_plain = not isinstance(dataset, module.IterableDataset)
            if is_plain and not given.arguments.get("num_workers"):
                # Each epoch has its own workers: the program may change the data set between two.
                given.arguments["num_workers"] = self.workers
                if self.pinned:
                    given.arguments.setdefault("pin_memory", True)
            init(*given.args, **given.kwargs)

        loader.__init__ = made
        if self.pinned:
            self._copy_without_waiting(module)

    def _copy_without_waiting(self, module: ModuleType) -> None:
        """``non_blocking=True`` of copies of the loader's tensors to a GPU.

        Until a program writes into such a tensor after it took the next batch.
        """
        iterator = module._BaseDataLoaderIter
        following = iterator.__next__

        @functools.wraps(following)
        def noted(own: Any) -> Any:
            batch = following(own)
            if self.pinned:
                self._note(batch)
            return batch

        iterator.__next__ = noted
        tensor = sys.modules["torch"].Tensor
        for name in ("to", "cuda"):
            setattr(tensor, name, self._copied(getattr(tensor, name)))

    def _note(self, batch: Any) -> None:
        if any(t._version != getattr(t, _MARK) for t in self._batch):
            self.pinned, self._batch = False, []
            print("nostall: the program writes into its batches: copies of them wait again",
                  file=sys.stderr)  # fmt: skip
            return
        found: list[Any] = []
        map_tensors(batch, found.append)
        self._batch = [tensor for tensor in found if tensor.is_pinned()]
        for tensor in self._batch:
            setattr(tensor, _MARK, tensor._version)

    def _copied(self, copy: Any) -> Any:
        torch = sys.modules["torch"]  # which can be partly imported here

        @functools.wraps(copy)
        def copied(own: Any, *args: Any, **options: Any) -> Any:
            is_batch = not torch.compiler.is_compiling() and self.pinned and hasattr(own, _MARK)
            if is_batch and not any(isinstance(value, bool) for value in args):
                options.setdefault("non_blocking", True)
            return copy(own, *args, **options)

        return copied


def look_at(batch: Any) -> tuple[float, bool]:
    """A number that tells two batches apart, and whether one of its tensors is on a GPU.

    The number is 0 where a batch or a tensor has no sum.
    """
    found: list[Any] = []
    with contextlib.suppress(Exception):  # any error of a user's class, or of nested tensors
        map_tensors(batch, found.append)
        sums = [float(t.double().nan_to_num().sum()) for t in found]
        number = float(sum(own * (at + 1) for at, own in enumerate(sums)))
        return number, any(t.is_cuda for t in found)
    return 0.0, any(t.is_cuda for t in found)
