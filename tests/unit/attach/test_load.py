"""``nostall.load``: what cuda.core, CuPy or a loader of one's own gets."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nostall
from nostall.attach.load import object_code
from nostall.core import BadBinary, BadInput, MissingPart
from nostall.store import Row, Store
from tests.unit.attach.variants import GPU, keep_variant

NVCC = Path(__file__).resolve().parents[3] / "examples" / "nvcc"
ORIGINAL = NVCC / "transpose.sm_90.cubin"
SEVERAL = NVCC.parents[1] / "tests" / "corpus" / "nvcc" / "atomics.fatbin"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Row]:
    store = Store(tmp_path_factory.mktemp("home"))
    return store, keep_variant(store, ORIGINAL.read_bytes())


@pytest.fixture
def kept(
    home: tuple[Store, Row], monkeypatch: pytest.MonkeyPatch
) -> tuple[Store, Row]:  # the store of this process
    monkeypatch.setenv("NOSTALL_HOME", str(home[0].root))
    monkeypatch.delenv("NOSTALL_GPU", raising=False)
    return home


def test_bytes(kept: tuple[Store, Row]) -> None:
    store, row = kept
    optimised = store.artefacts.get(row.optimised, "cubin")
    for source in (str(ORIGINAL), ORIGINAL, ORIGINAL.read_bytes()):
        assert nostall.load(source, to="bytes", gpu=GPU) == optimised
    assert nostall.load(ORIGINAL, "transpose", to="bytes", gpu=GPU) == optimised


def test_another_or_unknown_gpu_gets_the_original(
    kept: tuple[Store, Row], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert nostall.load(ORIGINAL, to="bytes", gpu="Yet another") == ORIGINAL.read_bytes()
        assert nostall.load(ORIGINAL, to="bytes") == ORIGINAL.read_bytes()
    assert sorted(r.message.count("this is Yet another") for r in caplog.records) == [0, 1]
    assert "set NOSTALL_GPU" in caplog.text


def test_the_gpu_by_variable(kept: tuple[Store, Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSTALL_GPU", GPU)
    assert nostall.load(ORIGINAL, to="bytes") != ORIGINAL.read_bytes()


def test_cuda_core_gets_these_very_bytes(
    kept: tuple[Store, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, row = kept
    code = object_code(store.artefacts.get(row.optimised, "cubin"))
    assert code.code_type == "cubin"
    assert code.code == store.artefacts.get(row.optimised, "cubin")
    # Looking a kernel up needs a driver, so that last call is written down instead.
    asked: list[tuple[bytes, str]] = []

    def from_cubin(data: bytes) -> Any:
        return SimpleNamespace(get_kernel=lambda name: asked.append((data, name)) or "kernel")

    monkeypatch.setattr("cuda.core.ObjectCode", SimpleNamespace(from_cubin=from_cubin))
    assert nostall.load(ORIGINAL, gpu=GPU) == "kernel"
    assert asked == [(code.code, "transpose")]


def test_cupy_gets_a_path_that_its_hash_names(
    kept: tuple[Store, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, row = kept
    stand_in = SimpleNamespace(RawModule=lambda path: Path(path))
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    loaded = nostall.load(ORIGINAL, to="cupy", gpu=GPU)
    assert loaded == store.artefacts.path(row.optimised, "cubin")
    original = nostall.load(ORIGINAL, to="cupy", gpu="Another")
    assert original.read_bytes() == ORIGINAL.read_bytes()
    assert original.name == f"{row.original}.cubin"


def test_cupy_without_a_store_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=lambda path: Path(path)))
    original = nostall.load(ORIGINAL, to="cupy", gpu=GPU)
    assert original.read_bytes() == ORIGINAL.read_bytes()
    assert nostall.load(ORIGINAL, to="cupy", gpu=GPU) == original  # CuPy knows modules by path


def test_without_the_package(kept: tuple[Store, Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingPart, match="CuPy cannot be imported"):
        nostall.load(ORIGINAL, to="cupy")
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(MissingPart, match=r"cuda\.core cannot be imported"):
        nostall.load(ORIGINAL)


def test_what_cannot_be_loaded(kept: tuple[Store, Row], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read cubin"):
        nostall.load(tmp_path / "nothing", to="bytes")
    with pytest.raises(BadBinary):
        nostall.load(b"nothing", to="bytes")
    with pytest.raises(BadInput, match="it holds: transpose"):
        nostall.load(ORIGINAL, "other", to="bytes")
    with pytest.raises(BadInput, match="allowed are"):
        nostall.load(ORIGINAL, to="tinygrad")  # type: ignore[call-overload]
    with pytest.raises(BadInput, match="name one of"):
        nostall.load(SEVERAL, arch="sm_90")
    with pytest.raises(BadInput, match=r"atomics\.fatbin.*--arch"):
        nostall.load(SEVERAL, to="bytes")


def test_the_package_has_these_two_and_no_others() -> None:
    assert nostall.optimize.__name__ == "optimize"
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        nostall.optimise  # type: ignore[attr-defined]  # noqa: B018
