"""Records of tuning results in the store, and records of bundles that are imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nostall.cli.tuning.tune import store_gain
from nostall.core import BadInput
from nostall.core.space import NO_TAGS
from nostall.sass import Program, Verdict
from nostall.sass.binary.cubin import Cubin
from nostall.sass.schedule import ScheduleSpace
from nostall.sass.schedule.moves import SetStall
from nostall.search import Anneal
from nostall.store import BadBundle, BadStore, Store, bundle
from nostall.store.artefacts import content_hash
from nostall.tuning.job import TuningResult, tune
from nostall.tuning.records import store_records
from nostall.tuning.records.result_records import cubin_notes
from nostall.tuning.records.store_records import import_bundle, record_result
from nostall.tuning.settings import Settings
from tests.unit.attach.variants import keep_variant
from tests.unit.store.records import provenance
from tests.unit.tuning.fake_device import SETTINGS, FakeDevice, load_example

CLUSTERS = Path(__file__).parents[3] / "corpus" / "nvcc" / "clusters.sm_90.cubin"
DEVICE_INFO = {"gpu": "A GPU", "architecture": "sm_90", "driver_version": "580.1"}


@pytest.fixture(scope="module")
def measured() -> TuningResult:
    """A measured gain."""
    source = load_example()
    return tune(source, Anneal(), SETTINGS, device=FakeDevice(0.9, 0.8, source.cubin))


def test_the_record_of_a_measured_gain(tmp_path: Path, measured: TuningResult) -> None:
    source, store = load_example(), Store(tmp_path)
    row = record_result(store, source, SETTINGS, measured, DEVICE_INFO)
    provenance = store.provenance(row)
    assert (provenance.kind, provenance.gpu) == ("measured", "A GPU")
    assert provenance.device == DEVICE_INFO
    assert (provenance.original, provenance.optimised) == (
        content_hash(source.cubin),
        content_hash(measured.cubin),
    )
    assert provenance.architecture == "sm_90"
    assert provenance.verified.safe
    assert provenance.verified.checked == measured.verdict.checked
    assert provenance.comparison is not None
    assert provenance.comparison.ratio == pytest.approx(1.25)
    assert provenance.comparison.triples == SETTINGS.rounds
    assert provenance.launch is not None and provenance.launch["block"] == list(source.launch.block)  # type: ignore[union-attr]
    assert provenance.toolchain["compiler"] == "cubin file"
    stored = store.lookup(source.cubin, gpu="A GPU", architecture="sm_90").cubin
    assert stored is not None and stored.data == measured.cubin


def test_a_record_is_verified_with_the_latency_table_of_its_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: TuningResult
) -> None:
    used: list[bool] = []

    def verify(original: bytes, optimised: bytes, *, measured_latencies: bool) -> Verdict:
        used.append(measured_latencies)
        return measured.verdict

    monkeypatch.setattr(store_records, "verify", verify)
    source = load_example()
    for latencies in (False, True):
        store = Store(tmp_path / str(latencies))
        settings = replace(SETTINGS, measured_latencies=latencies)
        row = record_result(store, source, settings, measured, DEVICE_INFO)
        assert store_records.rejection_reason(store, row) is None
        notes = store.provenance(row).notes
        assert any("measured on NVIDIA H200" in note for note in notes) is latencies
    assert used == [False, True]


def test_notes_depend_on_architecture_and_kind() -> None:
    assert "not measured on this architecture" in cubin_notes(100, "modelled")
    assert ".nv.capmerc keeps the original code" in cubin_notes(100, "measured")
    assert not any("not measured" in note for note in cubin_notes(100, "measured"))
    assert len(cubin_notes(90, "modelled")) == 1


def test_the_record_of_a_modelled_gain(tmp_path: Path) -> None:
    source, store = load_example("transpose"), Store(tmp_path)
    settings = Settings(evaluations=300)
    result = tune(source, Anneal(), settings)
    assert result.improved
    row = record_result(store, source, settings, result, DEVICE_INFO)
    assert (row.kind, row.gpu) == ("modelled", None)
    assert store.lookup(source.cubin, gpu="A GPU").cubin is None
    assert store.lookup(source.cubin, modelled=True).cubin is not None


def test_a_result_without_gain_is_not_recorded(tmp_path: Path, measured: TuningResult) -> None:
    source = load_example()
    unimproved = replace(measured, improved=False, cubin=source.cubin)
    with pytest.raises(BadInput, match="nothing to record"):
        record_result(Store(tmp_path), source, SETTINGS, unimproved, DEVICE_INFO)
    assert not (tmp_path / "index.sqlite").exists()


@pytest.mark.parametrize(
    ("device_info", "requested", "num_records"),
    [
        (DEVICE_INFO, None, 1),
        (DEVICE_INFO, True, 1),
        (DEVICE_INFO, False, 0),
        (None, None, 0),
        (None, False, 0),
    ],
)
def test_by_default_only_measured_gains_are_recorded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measured: TuningResult,
    device_info: dict[str, str] | None,
    requested: bool | None,
    num_records: int,
) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    row = store_gain(load_example(), SETTINGS, measured, device_info, requested)
    assert len(Store().rows()) == num_records
    assert (row is not None) == bool(num_records)


def test_an_unusable_store_is_an_error_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: TuningResult
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "file" / "home"))
    assert store_gain(load_example(), SETTINGS, measured, DEVICE_INFO, None) is None
    with pytest.raises(BadStore):
        store_gain(load_example(), SETTINGS, measured, DEVICE_INFO, True)


def test_the_records_of_a_bundle_are_imported(tmp_path: Path) -> None:
    exporting, importing = Store(tmp_path / "exporting"), Store(tmp_path / "importing")
    keep_variant(exporting, load_example().cubin)
    bundle.write(exporting, exporting.rows(), tmp_path / "b")
    (row,) = import_bundle(importing, tmp_path / "b")
    assert row == replace(exporting.rows()[0], source="imported")
    assert importing.lookup(load_example().cubin, gpu=row.gpu).cubin is not None


def closer_than_mined(original: bytes) -> bytes:
    """The cubin with an issue distance that only the measured table permits."""
    program = Program.from_cubin(original)
    function = program.kernel("cluster_sum")
    default = ScheduleSpace(program, function)
    measured = ScheduleSpace(program, function, measured_latencies=True)
    start = default.start()
    move = next(
        move
        for index in range(len(function.instructions))
        for cycles in range(1, int(start.stall[index]))
        if measured.apply_if_legal(start, move := SetStall(index, cycles, NO_TAGS)) is not None
        and default.apply_if_legal(start, move) is None
    )
    return measured.impose(measured.apply(start, move)).to_cubin()


def test_a_bundle_does_not_choose_the_rules_that_judge_it(tmp_path: Path) -> None:
    """Its settings say that its search permitted measured distances; the importer decides."""
    original = CLUSTERS.read_bytes()
    closer = closer_than_mined(original)
    exporting, importing = Store(tmp_path / "exporting"), Store(tmp_path / "importing")
    settings = {"measured_latencies": True}
    claim = provenance(original, closer, kernel="cluster_sum", settings=settings)
    own = exporting.record(original, closer, claim)
    assert store_records.rejection_reason(exporting, own) is None  # its own search
    bundle.write(exporting, exporting.rows(), tmp_path / "b")
    with pytest.raises(BadBundle, match=r"short-latency.*import with --measured-latencies"):
        import_bundle(importing, tmp_path / "b")
    assert importing.rows() == []
    (row,) = import_bundle(importing, tmp_path / "b", measured_latencies=True)
    assert row.source == "imported"
    assert "short-latency" in (store_records.rejection_reason(importing, row) or "")
    permitted = store_records.rejection_reason(importing, row, measured_latencies=True)
    assert permitted is None


def test_a_cubin_is_verified_again_for_another_kind_of_launch(tmp_path: Path) -> None:
    """The same files in two records: the one for dependent launches has to wait itself."""
    exporting, importing = Store(tmp_path / "exporting"), Store(tmp_path / "importing")
    original = load_example().cubin
    good = keep_variant(exporting, original)
    chain = exporting.provenance(good).model_copy(update={"dependent_launch": True})
    exporting.record(original, exporting.artefacts.get(good.optimised, "cubin"), chain)
    for rows in (exporting.rows(), exporting.rows()[::-1]):
        bundle.write(exporting, rows, tmp_path / "b")
        with pytest.raises(BadBundle, match="ACQBULK"):
            import_bundle(importing, tmp_path / "b")
        assert importing.rows() == []


def swap_instructions(original: bytes) -> bytes:
    """Exchange two neighbouring instructions, which makes the cubin unsafe."""
    text = Cubin.parse(original).texts[0]
    at = text.file_offset + 16 * 4
    first, second = original[at : at + 16], original[at + 16 : at + 32]
    return original[:at] + second + first + original[at + 32 :]


@pytest.mark.parametrize("forgery", ["unsafe", "no cubin", "architecture"])
def test_a_forged_bundle_is_not_imported(tmp_path: Path, forgery: str) -> None:
    """All hashes are right, and the provenance claims that the cubin is safe."""
    exporting, importing = Store(tmp_path / "exporting"), Store(tmp_path / "importing")
    original = load_example().cubin
    good = keep_variant(exporting, original)
    if forgery == "architecture":
        changed = exporting.provenance(good).model_copy(update={"architecture": "sm_80"})
        optimised = exporting.artefacts.get(good.optimised, "cubin")
        exporting.record(original, optimised, changed)
    else:
        bad = swap_instructions(original) if forgery == "unsafe" else b"no cubin"
        exporting.record(original, bad, provenance(original, bad))
    bundle.write(exporting, exporting.rows(), tmp_path / "b")
    with pytest.raises(BadBundle) as error:
        import_bundle(importing, tmp_path / "b")
    messages = {
        "unsafe": "the verifier of this version rejects the cubin",
        "no cubin": "ELF",
        "architecture": "does not match the cubin",
    }
    assert messages[forgery] in str(error.value)
    assert importing.rows() == []
