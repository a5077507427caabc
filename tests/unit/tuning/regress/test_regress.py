"""What a newer compiler lost is named, and found again in the input of the newer ptxas."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nostall.core import BadInput, Budget
from nostall.core.errors import MissingPart
from nostall.ptx.assemble.command import plain_command
from nostall.ptx.assemble.versions import Assembler, find_assemblers, version_numbers
from nostall.ptx.safety.validate import Validator
from nostall.sass.safety import validate
from nostall.tuning.regress import job, recover
from nostall.tuning.regress.job import Case, compare, find_ptxas
from nostall.tuning.regress.losses import find_losses, is_recovered, name_causes, shares
from nostall.tuning.regress.measured import measure
from nostall.tuning.regress.properties import Properties, read_properties
from nostall.tuning.settings import Settings
from tests.corpus.ptx_catalogue import ptx_texts
from tests.unit.tuning.assembler.kernel import InlineWorkers, TimedDevice, run_inline
from tests.unit.tuning.regress.pressure import PTX, assemble, make_case, make_source, without_ptx

NEWEST = max(find_assemblers(), key=lambda a: version_numbers(a.version))
OTHERS = [a for a in find_assemblers() if a != NEWEST]
NVCC = Path(__file__).resolve().parents[3] / "corpus" / "nvcc"


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(NEWEST)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(recover, "BuildPool", InlineWorkers)
    yield


def test_spills_are_named_and_recovered_by_a_proved_change(case: Case, inline: None) -> None:
    before, after = case.older.properties, case.newer.properties
    assert before.local_accesses == 0 < after.local_accesses and after.spill_bytes
    report = compare(case, Budget(evaluations=6))
    assert "local memory accesses" in {loss.name for loss in report.losses}
    assert report.causes[0].startswith("accesses of local memory 0 → ")
    assert report.answer == "recovered" and min(report.shares().values()) >= 0.9
    assert not report.left() and report.recovery is not None and report.recipe is not None
    best = report.recovery.best
    assert best is not None and best.properties.local_accesses == 0
    assert Validator(PTX).check(report.text).accepted and report.text != PTX
    assert not validate(best.candidate.cubin).findings
    document = report.to_json()
    assert document["search"]["left"] == [] and document["search"]["changes"]
    assert not {"words", "order"} & document["newer"].keys()


def test_a_search_of_a_limited_number_of_candidates_repeats(case: Case, inline: None) -> None:
    first, second = (compare(case, Budget(evaluations=6), seed=1).recovery for _ in range(2))
    assert first is not None and second is not None
    assert first.counts == second.counts and first.counts.total() - first.counts["unsafe"] == 6
    assert first.stopped in ("limit of candidates", "finished")
    states = [found.best.candidate.state if found.best else None for found in (first, second)]
    assert states[0] == states[1]


def test_what_the_verifier_rejects_is_not_found(
    case: Case, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recover, "hazards", lambda cubin, kernel: "2 findings")
    report = compare(case, Budget(evaluations=4))
    assert report.answer == "not recoverable" and report.recovery is not None
    assert report.recovery.best is None and report.recovery.counts["unsafe"] > 0
    assert set(report.shares().values()) == {0.0}


def test_without_ptx_the_cause_is_named(case: Case) -> None:
    report = compare(without_ptx(case), Budget(seconds=1))
    assert report.answer == "not recoverable" and report.causes and report.recovery is None


@pytest.mark.parametrize("name", ["slow", "pressure_of_another_name"])
def test_the_older_binary_may_have_another_name(case: Case, name: str) -> None:
    text = PTX.replace("pressure", name)
    older = job.older_by_cubin(case.source, assemble(NEWEST, ptx=text), "old.cubin")
    assert older.label == f"old.cubin:{name}"
    assert find_losses(older.properties, case.newer.properties)


def test_the_same_code_has_no_loss(case: Case) -> None:
    report = compare(replace(case, newer=case.older), Budget(seconds=1))
    assert report.answer == "same code" and not report.causes and report.recovery is None
    reversed_case = replace(case, older=case.newer, newer=case.older)
    assert [x.name for x in compare(reversed_case, None).losses] == ["missing warps"]


def changed(properties: Properties, **fields: object) -> Properties:
    return replace(properties, words=b"other", **fields)  # type: ignore[arg-type]


def test_each_loss_has_a_name_and_a_tolerance(case: Case) -> None:
    old = case.older.properties
    looped = changed(old, loops=replace(old.loops, instructions=100, accesses=10, issue_cycles=200))
    for fields, name in (
        ({"local_accesses": 1}, "local memory accesses"),
        ({"loops": replace(looped.loops, product_waits=2)}, "waits for products"),
        ({"warps_per_sm": old.warps_per_sm - 4}, "missing warps"),
        ({"instructions": 2 * old.instructions}, "instructions"),
        ({"loops": replace(looped.loops, instructions=110)}, "instructions of loops"),
        ({"loops": replace(looped.loops, issue_cycles=220)}, "issue cycles of loops"),
    ):
        new = changed(looped, **fields)
        (loss,) = find_losses(looped, new)
        assert loss.name == name and loss.newer > loss.older
        assert shares((loss,), looped, new) == {name: 0.0} and not find_losses(new, looped)
        assert shares((loss,), looped, looped) == {name: 1.0}
        assert is_recovered((loss,), looped, looped) and not is_recovered((loss,), looped, new)
    assert not find_losses(looped, changed(looped, instructions=old.instructions + 1))


def test_a_loop_that_is_unrolled_twice_is_no_loss(case: Case) -> None:
    old = case.older.properties
    loop = replace(old.loops, instructions=100, matrix=8, issue_cycles=200)
    twice = replace(loop, instructions=200, matrix=16, issue_cycles=400)
    before, after = changed(old, loops=loop), replace(old, words=b"2", loops=twice)
    assert not find_losses(before, after)
    assert any("unrolled otherwise: 8 → 16" in cause for cause in name_causes(before, after))


def test_another_loss_instead_is_no_recovery(case: Case) -> None:
    old, new = case.older.properties, case.newer.properties
    losses = find_losses(old, new)
    assert is_recovered(losses, old, old)
    waiting = changed(old, loops=replace(old.loops, product_waits=3))
    assert not is_recovered(losses, old, waiting)


def test_properties_of_compiled_kernels() -> None:
    plain, spilled = (
        read_properties((NVCC / f"pressure{kind}.sm_90.cubin").read_bytes(), "tile_14x14")
        for kind in ("", ".spills")
    )
    assert spilled.local_accesses > plain.local_accesses
    assert sum(plain.pipes.values()) == plain.instructions == len(plain.order)
    assert 0 < plain.loops.instructions <= plain.instructions and plain.loops.work > 0
    assert any("local memory" in str(loss) for loss in find_losses(plain, spilled))


def test_waits_for_asynchronous_products_are_counted() -> None:
    text = ptx_texts()["gemm_leakyrelu-wgmma.sm_90"]
    text = re.sub(r"\.version \d+\.\d+", ".version 8.7", text)  # each supported ptxas knows it
    kernel = re.search(r"\.entry (\w+)", text)
    assert kernel is not None
    loops = read_properties(assemble(NEWEST, ptx=text), kernel[1]).loops
    assert loops.product_waits > 0 and loops.work == loops.matrix > 0


def test_an_order_alone_is_named(case: Case) -> None:
    old = case.older.properties
    reordered = replace(old, words=b"2", order=old.order[::-1])
    assert name_causes(old, reordered)[0].startswith("the same instructions in another order")
    assert name_causes(old, changed(old)) == [
        "the same order with other registers, stall counts or waits"
    ]


@pytest.mark.skipif(not OTHERS, reason="needs two versions of ptxas")
def test_a_lower_version_needs_the_proof_of_the_newer_ptxas() -> None:
    known = job.lower_version(PTX, job._run(PTX.replace("8.0", "99.0"), COMMAND, OTHERS[0]))
    version = known[1].split()[-1]
    too_new = PTX.replace("8.0", job.lower_version(PTX, refused(NEWEST))[1].split()[-1])
    found = job.assemble_with(too_new, COMMAND, OTHERS[0], NEWEST)
    assert found.run.cubin and (found.lowered.endswith(f"→ {version}") or not found.lowered)
    assert job.offer_older(too_new, "pressure", COMMAND, OTHERS[0], NEWEST).offered


COMMAND = plain_command(PTX)


def refused(assembler: Assembler):  # type: ignore[no-untyped-def]
    return job._run(PTX.replace("8.0", "99.0"), COMMAND, assembler)


def test_newer_instructions_are_not_proved_away() -> None:
    text = ptx_texts()["nvcc-hopper.sm_90a"]
    run = replace(refused(NEWEST), detail="Unsupported .version 9.9; current version is '7.1'")
    lowered, words = job.lower_version(text, run)
    assert words.endswith("→ 7.1") and ".version 7.1" in lowered
    with pytest.raises(
        BadInput, match=r"(?s)→ 7.1 is not possible.*requires PTX ISA .*; give a newer baseline"
    ):
        job._prove(text, lowered, plain_command(text), NEWEST, words)


def test_other_machine_code_is_no_proof() -> None:
    limited = PTX.replace("\n{\n", "\n.maxnreg 32\n{\n")
    with pytest.raises(BadInput, match="other machine code"):
        job._prove(PTX, limited, COMMAND, NEWEST, "9.9 → 8.0")


def test_an_older_ptxas_with_a_known_fault_is_not_offered() -> None:
    text = ptx_texts()["gemm_leakyrelu-wgmma.sm_90"]
    kernel = re.search(r"\.entry (\w+)", text)
    old = Assembler(NEWEST.path, "12.9.86")
    offer = job.offer_older(text, kernel[1] if kernel else "", plain_command(text), old, NEWEST)
    assert not offer.offered and "flash-linear-attention/pull/1262" in offer.reason
    offer = job.offer_older(PTX, "pressure", COMMAND, NEWEST, NEWEST)
    assert not offer.offered and "not older" in offer.reason


def test_the_older_ptxas_is_looked_at_only_if_the_search_fails(
    case: Case, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recover, "hazards", lambda cubin, kernel: "2 findings")
    by_ptxas = replace(case, older=replace(case.older, assembler=NEWEST))
    assert compare(by_ptxas, Budget(evaluations=2)).offer is not None
    assert compare(case, Budget(evaluations=2)).offer is None


def test_a_ptxas_is_found_by_version_and_by_path(tmp_path: Path) -> None:
    start = ".".join(NEWEST.version.split(".")[:2])
    assert find_ptxas(start, [NEWEST]) == NEWEST == find_ptxas(NEWEST.version, [NEWEST])
    assert find_ptxas(str(NEWEST.path)).version == NEWEST.version
    for name in ("1.2", "latest", str(tmp_path)):
        with pytest.raises(MissingPart, match="installed versions are"):
            find_ptxas(name, [NEWEST])
    (tmp_path / "ptxas").write_text("no program")
    with pytest.raises(BadInput, match="is no program; give the path of a ptxas"):
        find_ptxas(str(tmp_path / "ptxas"))
    (tmp_path / "ptxas").chmod(0o755)
    with pytest.raises(BadInput, match="--version fails"):
        find_ptxas(str(tmp_path / "ptxas"))


def test_a_binary_of_another_architecture_is_refused() -> None:
    source = make_source(NEWEST)
    other = assemble(NEWEST, ptx=PTX.replace("sm_80", "sm_90"))
    with pytest.raises(BadInput, match=r"old is for sm_90, and k.ptx for sm_80"):
        job.older_by_cubin(source, other, "old")


def test_time_that_was_lost_is_searched(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run_inline(monkeypatch)

    class Device(TimedDevice):
        def factor(self, cubin: bytes) -> float:
            return 0.8 if cubin == case.older.cubin else super().factor(cubin)

    settings = Settings(
        "assembler", evaluations=30, objective="gpu", rounds=8, checks=2, anneal_share=0.0
    )
    measured = measure(case, settings, Device(case.newer.cubin))
    assert measured.older.faster and measured.found is not None and measured.found.improved
    lost, gained = 0.2, 1 - 1 / measured.found.ratio
    assert measured.recovered == pytest.approx(gained / lost) and 0 < measured.recovered < 1
    cubins = measure(without_ptx(case), settings, Device(case.newer.cubin))
    assert cubins.found is None and cubins.recovered == 0.0
    back = measure(replace(case, older=case.newer), settings, Device(case.newer.cubin))
    assert back.recovered is None and back.to_json()["found"] is None
