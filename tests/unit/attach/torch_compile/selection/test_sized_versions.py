"""Which version runs at which sizes; nothing is compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from nostall.attach.torch_compile.measure.call import AccuracyError  # noqa: E402
from nostall.attach.torch_compile.report import GraphReport  # noqa: E402
from nostall.attach.torch_compile.selection import sized_versions  # noqa: E402
from nostall.attach.torch_compile.selection.sized_versions import (  # noqa: E402
    SizedContext,
    SizedVersions,
)
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.attach.torch_compile.store.rank_sync import Selection  # noqa: E402
from nostall.attach.torch_compile.store.records import ComparisonRecord  # noqa: E402

pytestmark = pytest.mark.usefixtures("steps")
STITCHED = Selection("stitched")


def compared(ratio: float) -> ComparisonRecord:
    samples = (1.0,) * 12
    row = (ratio, ratio, ratio, 1.0, 1.0)
    return ComparisonRecord("measured", "fake", samples, samples, samples, *row, difference=0.0)


class Graph:
    """Versions that are faster or slower by their number of rows, and record which of them ran."""

    def __init__(self, error: Exception | None = None, least_rows: int = 100) -> None:
        self.ran: list[str] = []
        self.measured: list[int] = []
        self.compiled: list[str] = []
        self.kept: list[frozenset[str]] = []
        self.error, self.least_rows = error, least_rows
        places: Any = SimpleNamespace(bucket=lambda args: (len(args[0]).bit_length() // 2,))
        self.report = GraphReport("a" * 64)
        self.context = SizedContext(
            "a" * 64, KernelStore(), places, self.compile, self.compare, {}, self.report
        )

    def version(self, name: str) -> Any:
        def run(x: Tensor) -> Tensor:
            self.ran.append(name)
            return x

        return run

    def compile(self, selection: Selection) -> Any:
        self.compiled.append(selection.version)
        self.kept.append(selection.kept_in_inductor)
        return self.version(selection.version)

    def compare(self, baseline: Any, candidate: Any, call: Any) -> Any:
        self.measured.append(len(call.args[0]))
        if self.error is not None:
            raise self.error
        return compared(2.0 if len(call.args[0]) >= self.least_rows else 0.5), ("kernel",)

    def sized(self, rows: int = 200, kept: str = "") -> SizedVersions:
        run = self.version("stitched")
        return SizedVersions(
            self.context,
            Selection("stitched", frozenset(filter(None, [kept]))),
            {"stitched": run},
            (rows.bit_length() // 2,),
            "stitched",
        )

    def sized_of_inductor(self) -> SizedVersions:
        """What a later process has whose choice for the traced sizes is Inductor's version."""
        run = self.version("inductor")
        return SizedVersions(self.context, STITCHED, {"inductor": run}, (2,), "inductor")

    def calls(self, sized: SizedVersions, *rows: int) -> list[str]:
        before = len(self.ran)
        for count in rows:
            sized(torch.ones(count, 1))
        return self.ran[before:]


def test_a_bucket_is_measured_once_at_its_second_call() -> None:
    graph = Graph()
    sized = graph.sized()
    assert graph.calls(sized, 200, 300, 6) == ["stitched"] * 3, "the nearest bucket's version"
    assert not graph.measured and not graph.compiled
    assert graph.calls(sized, 7, 4, 200) == ["inductor", "inductor", "stitched"]
    assert graph.calls(sized, 600, 600, 600) == ["stitched"] * 3
    assert (graph.measured, graph.compiled) == ([7, 600], ["inductor"])
    assert [line.split(":")[0] for line in graph.report.at_sizes] == ["7x1", "600x1"]
    again = Graph()
    assert again.calls(again.sized(), 6, 6, 600) == ["inductor", "inductor", "stitched"]
    assert not again.measured, "the choices are stored"


def test_a_version_that_is_wrong_at_some_sizes_does_not_run_there() -> None:
    graph = Graph(AccuracyError("results differ"))
    assert graph.calls(graph.sized(), 6, 6, 6, 200) == [
        "stitched",
        "inductor",
        "inductor",
        "stitched",
    ]


def test_further_buckets_take_the_nearest_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sized_versions, "MOST_BUCKETS", 2)
    graph = Graph()
    sized = graph.sized()
    assert graph.calls(sized, 6, 6, 1, 1, 1, 5000) == ["stitched", *["inductor"] * 4, "stitched"]
    assert graph.measured == [6]


def test_nothing_is_measured_in_a_backward_pass() -> None:
    graph = Graph()
    sized = graph.sized()
    x = torch.ones(3, 1, requires_grad=True)

    def hook(gradient: Tensor) -> None:
        graph.calls(sized, 6, 6, 6)

    x.register_hook(hook)
    x.sum().backward()
    assert graph.ran == ["stitched"] * 3 and not graph.measured


def test_a_stored_choice_is_compiled_as_it_was_measured() -> None:
    graph = Graph()
    assert graph.calls(graph.sized(kept="inaccurate"), 600, 600) == ["stitched"] * 2
    again = Graph()
    assert again.calls(again.sized_of_inductor(), 600) == ["stitched"]
    assert again.kept == [{"inaccurate"}] and not again.measured
    other = Graph()
    other.calls(other.sized(kept="other"), 600, 600)
    assert other.measured == [600], "the stored choice is of another candidate"


def test_another_thread_may_add_a_bucket_while_the_nearest_one_is_sought() -> None:
    graph = Graph()
    sized = graph.sized()

    class Adding(int):
        def __rsub__(self, other: int) -> int:
            sized._runs[(50,)] = sized._runs[(4,)]
            return other - int(self)

        def __sub__(self, other: int) -> int:
            sized._runs[(50,)] = sized._runs[(4,)]
            return int(self) - other

    assert sized._nearest((Adding(3),)) is sized._runs[(4,)]
