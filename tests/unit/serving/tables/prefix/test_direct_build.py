"""Direct launches of the table builder pass what Triton's launcher passes, or are not used."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from nostall.serving.tables import device  # noqa: E402
from nostall.serving.tables.costs import TileSet  # noqa: E402
from nostall.serving.tables.device import DeviceBuilder, KernelLaunch, Prefixes  # noqa: E402
from nostall.serving.tables.host import bounded_capacity  # noqa: E402
from nostall.serving.tables.prefix import direct_build  # noqa: E402
from nostall.serving.tables.prefix.direct_build import DirectBuild  # noqa: E402
from nostall.serving.tables.settings import TableSettings  # noqa: E402

PAGE = 16
SETTINGS = TableSettings(8, 2, 4, TileSet(least_prefix=64), order="sorted")


class Binary:
    """A compiled kernel whose launches are written down, and leave a mark in the counts."""

    function, packed_metadata = "function", "packed"

    def __init__(self, calls: list[Any], mark: Any) -> None:
        self.calls, self.mark = calls, mark

    def run(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        self.mark()


class Launcher:
    """Stands for Triton's launcher and driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_triton: list[Any] = []
        self.direct: list[Any] = []
        self.builder = DeviceBuilder.of(SETTINGS, bounded_capacity(SETTINGS, 4, 4, 256, 2), "cpu")
        self.mark = self.right = lambda: self.builder.tables.counts.fill_(1)
        launcher = self

        def launch(self: KernelLaunch, grid: int, *varying: Any) -> Any:
            names = {name: value for name, value in self.constants.items() if name.isupper()}
            bound = inspect.signature(self.function.fn).bind(*varying, *self.fixed, **names)
            launcher.by_triton.append((grid, list(bound.arguments.values())))
            launcher.right()
            return Binary(launcher.direct, lambda: launcher.mark())

        active = SimpleNamespace(get_current_device=lambda: -1, get_current_stream=lambda _: 77)
        monkeypatch.setattr(KernelLaunch, "__call__", launch)
        monkeypatch.setattr(direct_build, "driver", SimpleNamespace(active=active))

    def find(self) -> DirectBuild | None:
        return DirectBuild.of(self.builder, *batch(3))


def batch(count: int) -> tuple[Any, Any, Prefixes]:
    ints = torch.int32
    table = torch.arange(1, 17, dtype=ints).repeat(count, 1)
    starts, lengths = torch.arange(count + 1, dtype=ints), torch.full((count,), 200, dtype=ints)
    return starts, lengths, Prefixes(block_table=table, page_size=PAGE)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    if not hasattr(device.find_leaders, "arg_names"):
        pytest.skip("Triton's interpreter is on")
    return Launcher(monkeypatch)


def address(value: Any) -> Any:
    return value.data_ptr() if torch.is_tensor(value) else value


def test_a_direct_build_passes_the_arguments_of_tritons_launcher(launcher: Launcher) -> None:
    assert launcher.find() is not None
    assert len(launcher.by_triton) == len(launcher.direct) == 3
    for (grid, wanted), found in zip(launcher.by_triton, launcher.direct, strict=True):
        assert found[:9] == (grid, 1, 1, 77, "function", "packed", None, None, None)
        assert list(found[9:]) == [address(value) for value in wanted]


def test_later_batches_have_their_own_tensors_and_sizes(launcher: Launcher) -> None:
    direct = launcher.find()
    assert direct is not None
    starts, lengths, prefixes = batch(2)
    assert direct(starts, lengths, prefixes.block_table)
    leaders, forest, tables = launcher.direct[-3:]
    assert leaders[0] == forest[0] == 2 and tables[0] == launcher.builder.grid
    pages = prefixes.block_table.data_ptr()
    assert leaders[9:15] == (pages, starts.data_ptr(), lengths.data_ptr(), 2, 16, 16)
    assert forest[9:11] == (starts.data_ptr(), 2)
    assert tables[9:12] == (starts.data_ptr(), lengths.data_ptr(), 2)


@pytest.mark.parametrize("fault", ["other tables", "an error", "an unknown version"])
def test_tritons_launcher_builds_what_a_direct_build_does_not(
    fault: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail() -> None:
        raise TypeError("function takes exactly 40 arguments")

    if fault == "an unknown version":
        monkeypatch.setattr(direct_build.triton, "__version__", "9.0.0")
    else:
        changed = {"an error": fail, "other tables": lambda: None}[fault]
        launcher.mark = changed
    caplog.set_level("INFO", "nostall")
    assert launcher.find() is None
    assert "launches the table builder itself" in caplog.text


@pytest.mark.parametrize("place", [0, 1, 2])
def test_tensors_of_other_alignment_or_dtype_are_left_to_triton(
    place: int, launcher: Launcher
) -> None:
    direct = launcher.find()
    assert direct is not None
    starts, lengths, prefixes = batch(3)
    right = [starts, lengths, prefixes.block_table]
    shifted, wide = list(right), list(right)
    whole = torch.zeros(right[place].numel() + 1, dtype=torch.int32)
    shifted[place] = whole[1:].view(right[place].shape)
    wide[place] = right[place].long()
    assert direct(*right)
    assert not direct(*shifted)
    assert not direct(*wide)


def test_hooks_are_left_to_triton(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = launcher.find()
    assert direct is not None
    starts, lengths, prefixes = batch(3)
    monkeypatch.setattr(direct_build.knobs.runtime, "launch_enter_hook", lambda *_: None)
    assert not direct(starts, lengths, prefixes.block_table)
