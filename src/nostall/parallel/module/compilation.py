"""Functions compiled by Inductor, which are called as they are where they cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._dynamo.exc import TorchDynamoException


class Compiled:
    """A function that ``torch.compile`` compiles at its first call, for fixed shapes."""

    def __init__(self, function: Callable[..., Any], note: Callable[[str], None]) -> None:
        """``note`` is told in one line why the function is not compiled, if it cannot be."""
        self._function, self._note = function, note
        self._call: Any = torch.compile(function, fullgraph=True, dynamic=False)

    def __call__(self, *given: Any) -> Any:
        try:
            return self._call(*given)
        # By its full name: what compiles nothing does not import Dynamo.
        except torch._dynamo.exc.TorchDynamoException as error:
            if self._call is self._function:
                raise
            self._note(failure(error))
            self._call = self._function
            return self._call(*given)


def failure(error: TorchDynamoException) -> str:
    """One line that says that something is not compiled, and why."""
    cause = getattr(error, "inner_exception", error)
    text = (str(cause).strip().splitlines() or [""])[0][:200]
    return f"not compiled: {type(cause).__name__}: {text}"
