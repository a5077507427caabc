"""The store of kernels and cached results: damaged files, unknown records, identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter  # noqa: E402
from nostall.attach.torch_compile.rewrite.matching import region_record  # noqa: E402
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.attach.torch_compile.store.records import SelectionRecord  # noqa: E402
from nostall.attach.torch_compile.store.regions import region_key, save_region  # noqa: E402
from nostall.fusion.codegen.cost.default_plan import default_plan  # noqa: E402
from nostall.fusion.codegen.emit.emit import emit  # noqa: E402
from nostall.fusion.codegen.generate import schedule_operators  # noqa: E402
from nostall.fusion.codegen.tiling.plan_space import plans  # noqa: E402
from nostall.fusion.recompute.kernels import default_kernels  # noqa: E402
from nostall.fusion.region_plans import plan_region  # noqa: E402
from nostall.store.errors import BadStore  # noqa: E402
from tests.unit.fusion.pattern_tables import PATTERNS  # noqa: E402
from tests.unit.fusion.patterns import layer_norm  # noqa: E402


def test_later_tuning_does_not_change_a_stored_selection(tmp_path: Path) -> None:
    graph, store = layer_norm((4, 24), "float32"), KernelStore(tmp_path)
    key, before = region_key(graph), region_record(graph, store)
    tuned = plan_region(graph, default_kernels(graph), lambda schedule: plans(schedule).legal[-1])
    after = save_region(graph, tuned, store)
    assert region_record(graph, store) == after != before
    selected, other = (KernelFilter(regions={key: record}) for record in (before, after))
    assert region_record(graph, store, selected.regions) == before
    assert selected.cache_key != other.cache_key, "PyTorch's caches must not mix them"


def test_a_damaged_kernel_is_not_loaded(tmp_path: Path) -> None:
    graph = PATTERNS["gated"]()
    schedule = schedule_operators(graph, graph.operators)
    store = KernelStore(tmp_path)
    kernel = store.put(emit(default_plan(schedule)))
    path = store.artefacts.path(kernel, "json")
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(BadStore, match="was changed"):
        store.load_kernel(kernel)


def selection_record(about: dict[str, Any]) -> SelectionRecord:
    return SelectionRecord(
        version="inductor", reason="x", kernels=(), comparison=None, about=about, created=""
    )


def test_a_stored_selection_is_loaded_and_holds_plain_values_only(tmp_path: Path) -> None:
    """``torch.__version__`` is a subclass of ``str``."""
    store, record = KernelStore(tmp_path), selection_record({"torch": torch.__version__})
    store.save("graph", record)
    assert store.load(SelectionRecord, "graph") == record
    with pytest.raises(NotImplementedError, match="a record holds <object"):
        store.save("graph", selection_record({"gpu": object()}))


@pytest.mark.parametrize("change", [(b"{", b""), (b"inductor", b"other"), (b"reason", b"reasons")])
def test_a_selection_of_another_schema_is_ignored(
    tmp_path: Path, change: tuple[bytes, ...]
) -> None:
    store = KernelStore(tmp_path)
    store.save("graph", selection_record({}))
    (file,) = (tmp_path / "choices").iterdir()
    file.write_bytes(file.read_bytes().replace(*change))
    assert store.load(SelectionRecord, "graph") is None


def test_an_emptied_store_has_a_new_identity(tmp_path: Path) -> None:
    store = KernelStore(tmp_path)
    first = store.identity
    assert KernelStore(tmp_path).identity == first
    (tmp_path / "identity").unlink()
    assert KernelStore(tmp_path).identity != first
