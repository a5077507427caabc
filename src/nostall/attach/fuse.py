"""``nostall.fuse``: ``torch.compile`` with nostall's backend, plus a report of each graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nostall.core.errors import MissingPart

if TYPE_CHECKING:
    from nostall.attach.torch_compile.report import GraphReport


class CompiledFunction:
    """A function or module compiled by :func:`fuse`; called like the original."""

    def __init__(self, function: Callable[..., Any], reports: list[GraphReport]) -> None:
        """``reports`` gets one entry for each graph that is traced."""
        self.function, self.reports = function, reports

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def explain(self) -> str:
        """Text that says which version each graph runs, why, and which calls were not fused."""
        return "\n".join(report.explain() for report in self.reports)


def fuse(
    function: Callable[..., Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> CompiledFunction:
    """Compile a function or module with ``torch.compile(function, backend="nostall", …)``.

    The arguments are those of ``torch.compile``, which accepts either ``mode`` or ``options``; this
    function accepts both. Options that start with ``nostall.`` are nostall's
    (docs/reference/torch-compile-options.md), and others are Inductor's.

    Raises :class:`MissingPart` without PyTorch or Triton.
    """
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise MissingPart(
            f"{error}; stitched kernels need PyTorch and Triton: "
            "pip install 'nostall[torch,triton]'"
        ) from error
    from nostall.attach.torch_compile.backend import Backend

    backend = Backend()
    if mode and mode != "default" and options:
        options, mode = {**torch._inductor.list_mode_options(mode, dynamic), **options}, None
    compiled = torch.compile(
        function,
        backend=backend,
        mode=mode,
        options=dict(options) if options else None,
        dynamic=dynamic,
        fullgraph=fullgraph,
    )
    return CompiledFunction(compiled, backend.reports)
