"""The objective as a pipeline: builds, duplicates, repeats, failures and counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nostall.gpu import PendingOutcome
from nostall.ptx.assemble.versions import Assembler, find_assemblers
from nostall.ptx.schedule.state import PtxState
from nostall.search.orders.operators import GIVEN, Operator, Proposal
from nostall.search.orders.pipeline import Finished, Pipeline
from nostall.tuning.assembler.candidate import find_hazards
from nostall.tuning.assembler.job import Setup
from nostall.tuning.assembler.objective import AssemblerObjective, idle_share
from tests.unit.tuning.assembler.kernel import TimedDevice, make_source, open_inline

REORDER = Operator("reorder", 20.0)


@pytest.fixture(scope="module")
def installed() -> list[Assembler]:
    return find_assemblers()[:2]


@pytest.fixture
def setup(installed: list[Assembler], monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    with open_inline(make_source(installed[0]), installed, monkeypatch) as opened:
        yield opened


def make_objective(setup: Setup, wrong_part: float = 0.0) -> AssemblerObjective:
    device = TimedDevice(setup.source.cubin, wrong_part=wrong_part)
    return AssemblerObjective(setup.pool, device)


def run_all(
    objective: AssemblerObjective, proposals: list[Proposal[PtxState]]
) -> dict[int, Finished[PtxState]]:
    for number, proposal in enumerate(proposals):
        objective.submit(number, proposal)
    finished = [objective.collect() for _ in proposals]
    return {one.number: one for one in finished}


def test_the_compilers_own_command_is_found_and_the_start_takes_the_originals_time(
    setup: Setup,
) -> None:
    objective = make_objective(setup)
    (start,) = objective.evaluate([setup.space.start()])
    assert setup.compiler.reproduces and setup.compiler.registers > 4
    assert start.value == pytest.approx(1e-5) and start.kind == "measured"
    assert isinstance(objective, Pipeline)


def test_proposals_are_built_and_measured_with_their_own_code(setup: Setup) -> None:
    objective = make_objective(setup)
    start = setup.space.start()
    objective.evaluate([start])
    orders = [Proposal(REORDER, start, seed=(n,)) for n in range(6)]
    finished = run_all(objective, orders)
    assert set(finished) == set(range(6))
    timed = [one for one in finished.values() if one.measurement is not None]
    dropped = [one for one in finished.values() if one.measurement is None]
    assert timed and {one.dropped for one in dropped} <= {"duplicate", "no change"}
    codes = {objective.candidate(one.state).code_sha256 for one in timed}
    assert len(codes) == len(timed) == objective.outcome_counts["timed"] - 1
    assert all(one.measurement and one.measurement.failure is None for one in timed)


def test_a_state_that_is_given_again_is_measured_again_without_a_build(setup: Setup) -> None:
    objective = make_objective(setup)
    start = setup.space.start()
    objective.evaluate([start])
    tasks = setup.pool.tasks  # type: ignore[attr-defined]
    finished = run_all(objective, [Proposal(GIVEN, start)] * 3)
    assert all(one.measurement and one.state == start for one in finished.values())
    assert objective.outcome_counts["measured again"] == 3
    assert setup.pool.tasks == tasks  # type: ignore[attr-defined]


def test_renamed_kernels_with_equal_code_are_duplicates(setup: Setup) -> None:
    objective = make_objective(setup)
    start = setup.space.start()
    objective.evaluate([start])
    renamed = PtxState(kernel_name="cutlass_scale")
    finished = run_all(objective, [Proposal(GIVEN, renamed)])
    assert finished[0].dropped == "duplicate" and objective.outcome_counts["duplicate"] == 1


def test_a_candidate_with_wrong_outputs_fails_and_is_counted(setup: Setup) -> None:
    objective = make_objective(setup, wrong_part=1.0)
    objective.evaluate([setup.space.start()])
    proposals = [Proposal(REORDER, setup.space.start(), seed=(n,)) for n in range(4)]
    finished = run_all(objective, proposals)
    failures = [one.measurement.failure for one in finished.values() if one.measurement]
    assert failures and set(failures) == {"wrong: 4 words differ"}
    assert objective.outcome_counts["wrong"] == len(failures)


def test_a_state_that_ptxas_rejects_is_dropped_with_its_reason(setup: Setup) -> None:
    objective = make_objective(setup)
    state = PtxState(options=("--no-such-option",))
    finished = run_all(objective, [Proposal(GIVEN, state)])
    assert finished[0].dropped == "error"
    (measurement,) = objective.evaluate([state])
    assert measurement.failure is not None and "no-such-option" in measurement.failure


def test_states_with_hazards_are_not_safe(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = make_objective(setup)
    start = setup.space.start()
    objective.evaluate([start])
    module = "nostall.tuning.assembler.objective.find_hazards"
    monkeypatch.setattr(module, find_hazards)
    assert objective.safe_states([start]) == [start]
    monkeypatch.setattr(module, lambda builder, cubin: "1 findings, first: a race")
    assert objective.safe_states([start]) == []
    assert objective.outcome_counts["unsafe"] == 1


class SlowDevice(TimedDevice):
    """An asynchronous device that notes what is announced."""

    announced: list[bytes]

    def start(self, cubin: bytes) -> PendingOutcome:
        return PendingOutcome(
            lambda: True, lambda: self.evaluate(cubin), lambda next: self.announced.append(next)
        )


def test_the_next_candidate_is_announced_and_an_ended_search_drops_its_proposals(
    setup: Setup,
) -> None:
    device = SlowDevice(setup.source.cubin)
    device.announced = []
    objective = AssemblerObjective(setup.pool, device)
    start = setup.space.start()
    for number in range(6):
        objective.submit(number, Proposal(REORDER, start, seed=(number,)))
    first = objective.collect()
    assert first.number == 0 and device.announced
    objective.discard()
    objective.submit(9, Proposal(GIVEN, first.state))
    assert objective.collect().number == 9


def test_a_cubin_that_was_not_kept_is_built_again(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nostall.tuning.assembler.objective._MAX_CUBINS", 2)
    objective = make_objective(setup)
    start = setup.space.start()
    finished = run_all(objective, [Proposal(REORDER, start, seed=(n,)) for n in range(8)])
    states = [one.state for one in finished.values() if one.measurement]
    assert len(states) > 3
    cubins = [objective.candidate(state).cubin for state in states]
    assert all(cubins) and len(set(cubins)) == len(cubins)
    again = run_all(objective, [Proposal(GIVEN, state) for state in states])
    assert all(one.measurement and not one.measurement.failure for one in again.values())


def test_the_idle_share_counts_what_the_device_did(setup: Setup) -> None:
    objective = make_objective(setup)
    objective.evaluate([setup.space.start()] * 5)
    assert idle_share(objective, 0.02) == pytest.approx(0.5)
