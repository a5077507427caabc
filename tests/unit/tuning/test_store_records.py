"""From a tuning run into the store, and from a bundle once it is verified here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nostall.cli import tune as cli
from nostall.core import BadInput, LaunchSpec
from nostall.sass.binary.cubin import Cubin
from nostall.search import Anneal
from nostall.store import BadBundle, BadStore, Store, bundle
from nostall.store.artefacts import content_hash
from nostall.tuning.job import Settings, TuningResult, notes_on, tune
from nostall.tuning.source import Source, load_cubin
from nostall.tuning.store_records import import_bundle, record
from tests.unit.attach.variants import keep_variant
from tests.unit.store.records import provenance
from tests.unit.tuning.test_gpu_objective import SETTINGS, Pretended

NVCC = Path(__file__).resolve().parents[3] / "examples" / "nvcc"
ABOUT = {"gpu": "A GPU", "architecture": "sm_90", "driver_version": "580.1"}


def _source(kernel: str = "dot_product") -> Source:
    launch = LaunchSpec.from_toml(NVCC / f"{kernel}.toml")
    return load_cubin(NVCC / f"{kernel}.sm_90.cubin", None, launch)


@pytest.fixture(scope="module")
def measured() -> TuningResult:
    source = _source()
    return tune(source, Anneal(), SETTINGS, device=Pretended(0.9, 0.8, source.cubin))


def test_a_measured_gain_with_all_that_is_known(tmp_path: Path, measured: TuningResult) -> None:
    source, store, tuned = _source(), Store(tmp_path), measured
    row = record(store, source, SETTINGS, tuned, ABOUT)
    known = store.provenance(row)
    assert (known.kind, known.gpu, known.device) == ("measured", "A GPU", ABOUT)
    assert (known.original, known.optimised) == (
        content_hash(source.cubin),
        content_hash(tuned.cubin),
    )
    assert known.architecture == "sm_90"
    assert known.verified.safe
    assert known.verified.checked == tuned.verdict.checked
    assert known.comparison is not None
    assert known.comparison.ratio == pytest.approx(1.25)
    assert known.comparison.triples == SETTINGS.rounds
    assert known.launch is not None and known.launch["block"] == list(source.launch.block)  # type: ignore[union-attr]
    assert known.toolchain["compiler"] == "cubin file"
    found = store.lookup(source.cubin, gpu="A GPU", architecture="sm_90").cubin
    assert found is not None and found.data == tuned.cubin


def test_what_was_measured_is_not_called_unmeasured() -> None:
    assert "not measured on this architecture" in notes_on(100, "modelled")
    assert ".nv.capmerc keeps the original code" in notes_on(100, "measured")
    assert not any("not measured" in note for note in notes_on(100, "measured"))
    assert len(notes_on(90, "modelled")) == 1


def test_a_modelled_gain_is_marked_so(tmp_path: Path) -> None:
    source, store = _source("transpose"), Store(tmp_path)
    settings = Settings(evaluations=300)
    tuned = tune(source, Anneal(), settings)
    assert tuned.improved
    row = record(store, source, settings, tuned, ABOUT)
    assert (row.kind, row.gpu) == ("modelled", None)
    assert store.lookup(source.cubin, gpu="A GPU").cubin is None
    assert store.lookup(source.cubin, modelled=True).cubin is not None


def test_no_gain_is_no_record(tmp_path: Path, measured: TuningResult) -> None:
    source = _source()
    same = replace(measured, improved=False, cubin=source.cubin)
    with pytest.raises(BadInput, match="nothing to record"):
        record(Store(tmp_path), source, SETTINGS, same, ABOUT)
    assert not (tmp_path / "index.sqlite").exists()


@pytest.mark.parametrize(
    ("about", "wanted", "kept"),
    [
        (ABOUT, None, 1),
        (ABOUT, True, 1),
        (ABOUT, False, 0),
        (None, None, 0),
        (None, False, 0),
    ],
)
def test_measured_gains_are_kept_unless_refused_and_modelled_ones_when_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measured: TuningResult,
    about: dict[str, str] | None,
    wanted: bool | None,
    kept: int,
) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    row = cli._keep(_source(), SETTINGS, measured, about, wanted)
    assert len(Store().rows()) == kept
    assert (row is not None) == bool(kept)


def test_a_store_that_does_not_work_spoils_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: TuningResult
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "file" / "home"))
    assert cli._keep(_source(), SETTINGS, measured, ABOUT, None) is None
    with pytest.raises(BadStore):
        cli._keep(_source(), SETTINGS, measured, ABOUT, True)


def test_a_bundle_is_verified_here(tmp_path: Path) -> None:
    there, here = Store(tmp_path / "there"), Store(tmp_path / "here")
    keep_variant(there, _source().cubin)
    bundle.write(there, there.rows(), tmp_path / "b")
    (row,) = import_bundle(here, tmp_path / "b")
    assert row == replace(there.rows()[0], source="imported")
    assert here.lookup(_source().cubin, gpu=row.gpu).cubin is not None


def _swapped(original: bytes) -> bytes:
    """Two neighbouring instructions exchanged without asking whether they may be."""
    text = Cubin.parse(original).texts[0]
    at = text.file_offset + 16 * 4
    one, two = original[at : at + 16], original[at + 16 : at + 32]
    return original[:at] + two + one + original[at + 32 :]


@pytest.mark.parametrize("forgery", ["unsafe", "no cubin", "architecture"])
def test_a_forged_bundle_changes_nothing(tmp_path: Path, forgery: str) -> None:
    """All hashes are right, and the provenance says that it is safe."""
    there, here = Store(tmp_path / "there"), Store(tmp_path / "here")
    original = _source().cubin
    good = keep_variant(there, original)
    if forgery == "architecture":
        known = there.provenance(good).model_copy(update={"architecture": "sm_80"})
        there.record(original, there.artefacts.get(good.optimised, "cubin"), known)
    else:
        bad = _swapped(original) if forgery == "unsafe" else b"no cubin"
        there.record(original, bad, provenance(original, bad))
    bundle.write(there, there.rows(), tmp_path / "b")
    with pytest.raises(BadBundle) as error:
        import_bundle(here, tmp_path / "b")
    wanted = {
        "unsafe": "verifier refuses it",
        "no cubin": "ELF",
        "architecture": "does not fit the cubin",
    }
    assert wanted[forgery] in str(error.value)
    assert here.rows() == []
