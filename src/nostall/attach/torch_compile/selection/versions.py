"""The two versions of one graph: compiled when they are asked for, and what that took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

from nostall.attach.torch_compile.graph_copies import apart, as_traced
from nostall.attach.torch_compile.graph_key import device_of, symbols
from nostall.attach.torch_compile.options import Settings
from nostall.attach.torch_compile.report import GraphReport
from nostall.attach.torch_compile.rewrite.compilers import (
    Compiled,
    EagerHost,
    Host,
    InductorHost,
    Unavailable,
)
from nostall.attach.torch_compile.rewrite.inductor_pass import Observer
from nostall.attach.torch_compile.rewrite.kernel_selection import Selection, Stitching
from nostall.attach.torch_compile.store.rank_sync import Chosen
from nostall.attach.warning import say_once

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """A stitched version, ready to run, and how it came to be."""

    run: Compiled
    done: Stitching
    chosen: Chosen = field(default_factory=lambda: Chosen("stitched"))


class Versions:
    """Of a graph with these inputs; ``report`` is told about them.  ``varies``: whether a size of
    the inputs does."""

    def __init__(
        self,
        settings: Settings,
        patches: Mapping[str, Any],
        inputs: Sequence[Any],
        report: GraphReport,
    ) -> None:
        self.host: Host = InductorHost(patches) if settings.rest == "inductor" else EagerHost()
        self.settings, self.report = settings, report
        self.device, self.varies = device_of(inputs), len(symbols(inputs)) > 0

    @property
    def observed(self) -> bool:
        """Whether Inductor shows its graphs while it compiles its own version.

        PyTorch's caches know graphs by the passes that they went through: a run that knows its
        choice must have the same ones as the run that had to look.
        """
        return self.settings.background or self.varies

    def plain(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        observe: Observer | None = None,
        spare: GraphModule | None = None,
    ) -> Compiled:
        """As the user's mode has it, or operator by operator where Inductor cannot compile here.
        ``spare`` is compiled then: a copy, or the module in whatever form Inductor left it; without
        it the module is copied before."""
        kept = apart(module) if spare is None else spare
        try:
            return self.timed("plain", lambda: self.host.plain(module, inputs, observe))
        except Unavailable as error:
            say_once(f"Inductor is not available, PyTorch's operators run one by one: {error}")
            self.host = EagerHost()
            return self.timed("plain", lambda: self.host.plain(apart(kept), inputs))

    def stitched(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        chosen: Chosen,
        ahead: Stitching | None = None,
    ) -> Candidate:
        """As chosen.  ``ahead``: what another process has put in, where it compiled this before."""
        selection = self.selection(chosen)
        run, done = self.timed("stitched", lambda: self._put_in(module, inputs, selection, ahead))
        return Candidate(run, done, chosen)

    def selection(self, chosen: Chosen) -> Selection:
        """The kernels of a choice."""
        return Selection(self.settings.extent, chosen.left, chosen.regions)

    def timed(self, what: str, work: Callable[[], T]) -> T:
        """Do some work, and tell the report how long it took."""
        began = time.perf_counter()
        try:
            return work()
        finally:
            self.report.seconds[what] = time.perf_counter() - began

    def _put_in(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        selection: Selection,
        ahead: Stitching | None,
    ) -> tuple[Compiled, Stitching]:
        done = Stitching()
        with as_traced(inputs) as traced:
            run = self.host.stitched(module, traced, selection, done)
        if ahead is not None and not done.kernels:
            done = ahead  # the graphs came from the cache
        for kernel in dict.fromkeys(done.kernels):
            warm(kernel, self.device)
        self.report.refused = done.refused
        self.report.kernels = len(done.kernels) or self.report.kernels
        self.report.left = len(selection.left)
        return run, done


def warm(kernel: str, device: torch.device) -> None:
    """Compile a kernel, and load it where it would be loaded at its first launch."""
    from nostall.attach.torch_compile.runtime.custom_op import resolve

    resolve(kernel).warm(device)
