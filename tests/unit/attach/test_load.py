"""``nostall.load``: results for cuda.core, CuPy and as bytes, and its errors."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nostall
from nostall.attach.load import object_code
from nostall.attach.store_lookup import find_replacement
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
def stored(home: tuple[Store, Row], monkeypatch: pytest.MonkeyPatch) -> tuple[Store, Row]:
    """A store with one record, set as the store of this process."""
    monkeypatch.setenv("NOSTALL_HOME", str(home[0].root))
    monkeypatch.delenv("NOSTALL_GPU", raising=False)
    return home


def test_load_as_bytes(stored: tuple[Store, Row]) -> None:
    store, row = stored
    optimised = store.artefacts.get(row.optimised, "cubin")
    for source in (str(ORIGINAL), ORIGINAL, ORIGINAL.read_bytes()):
        assert nostall.load(source, to="bytes", gpu=GPU) == optimised
    assert nostall.load(ORIGINAL, "transpose", to="bytes", gpu=GPU) == optimised


def test_another_or_unknown_gpu_gets_the_original(
    stored: tuple[Store, Row], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert nostall.load(ORIGINAL, to="bytes", gpu="Yet another") == ORIGINAL.read_bytes()
        assert nostall.load(ORIGINAL, to="bytes") == ORIGINAL.read_bytes()
    assert sorted(r.message.count("this is Yet another") for r in caplog.records) == [0, 1]
    assert "set NOSTALL_GPU" in caplog.text


def test_a_record_of_another_compiler_is_named_once(
    stored: tuple[Store, Row], caplog: pytest.LogCaptureFixture
) -> None:
    original = ORIGINAL.read_bytes()
    same_compiler = original + b"\0"
    release = b"\x04\x37\x04\x00"
    at = original.index(release) + len(release)
    newer = original[:at] + bytes([137]) + original[at + 1 :]
    newer = newer.replace(b"V13.0.88", b"V13.7.10")
    for _ in range(2):
        assert find_replacement(same_compiler, "test", gpu=GPU) is None
        assert find_replacement(newer, "test", gpu=GPU) is None
    (message,) = (r.message for r in caplog.records if "made it" in r.message)
    assert "transpose runs as ptxas 13.7" in message and stored[1].id[:12] in message
    assert "`nostall tune`" in message


def test_the_gpu_from_the_environment(
    stored: tuple[Store, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_GPU", GPU)
    assert nostall.load(ORIGINAL, to="bytes") != ORIGINAL.read_bytes()


def test_load_for_cuda_core(stored: tuple[Store, Row], monkeypatch: pytest.MonkeyPatch) -> None:
    store, row = stored
    code = object_code(store.artefacts.get(row.optimised, "cubin"))
    assert code.code_type == "cubin"
    assert code.code == store.artefacts.get(row.optimised, "cubin")
    # get_kernel needs a driver, so this last call is recorded instead.
    calls: list[tuple[bytes, str]] = []

    def from_cubin(data: bytes) -> Any:
        return SimpleNamespace(get_kernel=lambda name: calls.append((data, name)) or "kernel")

    monkeypatch.setattr("cuda.core.ObjectCode", SimpleNamespace(from_cubin=from_cubin))
    assert nostall.load(ORIGINAL, gpu=GPU) == "kernel"
    assert calls == [(code.code, "transpose")]


def test_load_for_cupy_as_a_file_named_by_its_hash(
    stored: tuple[Store, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, row = stored
    fake_cupy = SimpleNamespace(RawModule=lambda path: Path(path))
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    loaded = nostall.load(ORIGINAL, to="cupy", gpu=GPU)
    assert loaded.read_bytes() == store.artefacts.get(row.optimised, "cubin")
    assert loaded.name == f"{row.optimised}.cubin"
    assert store.root not in loaded.parents  # the store may change before CuPy opens the file
    original = nostall.load(ORIGINAL, to="cupy", gpu="Another")
    assert original.read_bytes() == ORIGINAL.read_bytes()
    assert original.name == f"{row.original}.cubin"


def test_load_for_cupy_without_a_writable_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=lambda path: Path(path)))
    original = nostall.load(ORIGINAL, to="cupy", gpu=GPU)
    assert original.read_bytes() == ORIGINAL.read_bytes()
    assert nostall.load(ORIGINAL, to="cupy", gpu=GPU) == original  # CuPy caches modules by path


def test_missing_packages(stored: tuple[Store, Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingPart, match="CuPy cannot be imported"):
        nostall.load(ORIGINAL, to="cupy")
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(MissingPart, match=r"cuda\.core cannot be imported"):
        nostall.load(ORIGINAL)


def test_sources_that_cannot_be_loaded(stored: tuple[Store, Row], tmp_path: Path) -> None:
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


def test_attributes_of_the_package() -> None:
    assert nostall.optimize.__name__ == "optimize"
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        nostall.optimise  # type: ignore[attr-defined]  # noqa: B018
