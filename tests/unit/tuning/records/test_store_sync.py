"""Records are exchanged through a shared folder; only signed and verified ones are imported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from nostall.cli.store import sync as sync_command
from nostall.cli.terminal.console import Format
from nostall.core import BadInput
from nostall.search import Anneal
from nostall.store import Row, Store
from nostall.tuning.job import TuningResult, tune
from nostall.tuning.records import store_records
from nostall.tuning.records.store_records import record_result
from nostall.tuning.records.store_sync import read_key, sync
from tests.unit.tuning.fake_device import SETTINGS, FakeDevice, load_example

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


@pytest.fixture(scope="module")
def measured() -> TuningResult:
    source = load_example()
    return tune(source, Anneal(), SETTINGS, device=FakeDevice(0.9, 0.8, source.cubin))


@pytest.fixture
def first(tmp_path: Path) -> Store:
    return Store(tmp_path / "first")


@pytest.fixture
def second(tmp_path: Path) -> Store:
    return Store(tmp_path / "second")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def record(store: Store, measured: TuningResult, gpu: str = "A GPU", **settings: bool) -> Row:
    used = replace(SETTINGS, **settings)
    return record_result(store, load_example(), used, measured, {"gpu": gpu})


def test_records_travel_once_and_local_ones_come_first(
    first: Store, second: Store, shared: Path, measured: TuningResult
) -> None:
    row = record(first, measured)
    exchange = sync(first, shared, KEY)
    assert exchange.sent == [row] and not exchange.received and not exchange.refused
    assert [path.parent.name for path in shared.rglob("*.zip")] == ["A-GPU"]
    assert sync(first, shared, KEY).sent == []
    received = sync(second, shared, KEY).received
    assert received == [replace(row, source="imported")] == second.rows()
    assert sync(second, shared, KEY).received == [] and sync(second, shared, KEY).sent == []
    own = record(second, measured, seed=1)
    found = second.lookup(load_example().cubin, gpu="A GPU").cubin
    assert found is not None and found.row.id == own.id and found.row.source == "tuned"


def test_a_claim_of_a_larger_gain_does_not_come_before_a_local_record(
    first: Store, second: Store, shared: Path, measured: TuningResult
) -> None:
    own = record(second, measured, seed=1)
    row = record(first, measured)
    contents = first.contents(row)
    assert contents.provenance.comparison is not None
    claim = contents.provenance.comparison.model_copy(update={"ratio": 9.0, "low": 8.0})
    boasting = contents.provenance.model_copy(update={"ratio": 9.0, "comparison": claim})
    first.remove(row)
    first.record(contents.original, contents.optimised, boasting)
    sync(first, shared, KEY)
    assert sync(second, shared, KEY).received[0].low == 8.0
    found = second.lookup(load_example().cubin, gpu="A GPU").cubin
    assert found is not None and found.row.id == own.id


def test_imports_do_not_use_the_weaker_latencies(
    first: Store, second: Store, shared: Path, measured: TuningResult,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    record(first, measured, measured_latencies=True)
    sync(first, shared, KEY)
    given: list[bool] = []
    verify = store_records.verify

    def noting(*cubins: bytes, measured_latencies: bool = False):  # type: ignore[no-untyped-def]
        given.append(measured_latencies)
        return verify(*cubins, measured_latencies=measured_latencies)

    monkeypatch.setattr(store_records, "verify", noting)
    assert sync(second, shared, KEY).received and given == [False]


@pytest.mark.parametrize("damage", ["key", "content", "name", "other record"])
def test_what_is_not_signed_by_the_key_is_refused(
    first: Store, second: Store, shared: Path, measured: TuningResult, damage: str
) -> None:
    record(first, measured)
    sync(first, shared, OTHER_KEY if damage == "key" else KEY)
    (path,) = shared.rglob("*.zip")
    if damage == "content":
        path.write_bytes(path.read_bytes() + b"x")
    elif damage == "name":
        path.rename(path.with_name("0" * 64 + path.name[64:]))
    elif damage == "other record":
        path.write_bytes(b"no bundle")
    exchange = sync(second, shared, KEY)
    ((refused, reason),) = exchange.refused
    assert "signature" in reason and refused.parent.name == "A-GPU"
    assert not exchange.received and not second.rows()


@pytest.mark.parametrize("damage", ["key", "content", "folder"])
def test_what_is_not_signed_by_the_key_is_sent_again(
    first: Store, second: Store, shared: Path, measured: TuningResult, damage: str
) -> None:
    row = record(first, measured)
    sync(first, shared, OTHER_KEY if damage == "key" else KEY)
    (path,) = shared.rglob("*.zip")
    if damage == "content":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "folder":
        path.unlink()
        (path.parent / f"{row.id}.{'0' * 64}.zip").mkdir()
    assert sync(first, shared, KEY).sent == [row]
    exchange = sync(second, shared, KEY)
    assert [r.id for r in exchange.received] == [row.id]


def test_a_file_that_cannot_be_read_does_not_stop_the_others(
    first: Store, second: Store, shared: Path, measured: TuningResult
) -> None:
    record(first, measured)
    sync(first, shared, KEY)
    (path,) = shared.rglob("*.zip")
    (path.parent / f"{'0' * 64}.{'0' * 64}.zip").symlink_to("deleted")
    exchange = sync(second, shared, KEY)
    assert len(exchange.received) == 1
    assert [reason for _, reason in exchange.refused] == [
        "it cannot be read: No such file or directory"
    ]


def test_a_signed_file_that_is_no_bundle_is_refused(second: Store, shared: Path) -> None:
    from nostall.tuning.records.store_sync import _sign

    id = "a" * 64
    (shared / "GPU").mkdir()
    (shared / "GPU" / f"{id}.{_sign(KEY, id, b'no bundle')}.zip").write_bytes(b"no bundle")
    ((_, reason),) = sync(second, shared, KEY).refused
    assert "is not a bundle" in reason


def test_one_gpu_and_other_files_are_left_alone(
    first: Store, second: Store, shared: Path, measured: TuningResult
) -> None:
    record(first, measured)
    record(first, measured, gpu="Other/GPU 2")
    (shared / "notes.txt").write_text("hello")
    assert sync(first, shared, KEY, gpu="Other/GPU 2").sent[0].gpu == "Other/GPU 2"
    assert len(sync(first, shared, KEY).sent) == 1
    assert [row.gpu for row in sync(second, shared, KEY, gpu="A GPU").received] == ["A GPU"]


def test_the_command(
    tmp_path: Path, shared: Path, measured: TuningResult, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "first"))
    key = tmp_path / "team.key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    row = record(Store(), measured)
    sync_command(shared, key)
    assert capsys.readouterr().out.startswith("1 record sent to")
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "second"))
    sync_command(shared, key, format=Format.JSON)
    assert json.loads(capsys.readouterr().out)["received"] == [row.id]
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "third"))
    key.write_bytes(OTHER_KEY)
    with pytest.raises(typer.Exit) as ended:
        sync_command(shared, key)
    assert ended.value.exit_code == 1 and "refused" in capsys.readouterr().err


def test_keys_and_folders_that_cannot_be_used(tmp_path: Path, first: Store) -> None:
    key = tmp_path / "key"
    with pytest.raises(BadInput, match=r"cannot read the key .*secrets"):
        read_key(key)
    key.write_text("short")
    key.chmod(0o600)
    with pytest.raises(BadInput, match="has 5 bytes; at least 32"):
        read_key(key)
    key.write_bytes(KEY)
    key.chmod(0o644)
    with pytest.raises(BadInput, match=r"mode 644\); chmod 600"):
        read_key(key)
    with pytest.raises(BadInput, match="is no folder; make it"):
        sync(first, key, KEY)
