"""The issue engine compared with cycles computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.sass.model.model_kernels import cycles, ins, model

from nostall.core.launch import LaunchSpec
from nostall.sass.model import Reason
from nostall.sass.model.parameters import PARAMETERS

SM80 = PARAMETERS[80]
CHAIN = "FFMA R0, R0, R1, R2"


@pytest.mark.parametrize(("count", "stall"), [(1, 1), (10, 4), (50, 2), (7, 11)])
def test_a_dependent_chain_takes_its_stall_counts(count, stall):
    assert cycles([ins(CHAIN, stall)] * count) == count * stall


def test_stall_below_the_pipes_occupancy_waits_for_the_pipe():
    # 16 lanes: 32 threads occupy the FMA pipe of sm_80 for 2 cycles; the last one only stalls 1.
    assert cycles([ins(CHAIN)] * 100) == 2 * 99 + 1
    # 32 lanes on sm_90: one cycle.
    assert cycles([ins(CHAIN)] * 100, sm=90) == 100


@pytest.mark.parametrize("warps", [1, 2, 4, 8])
def test_warps_hide_each_others_latency_until_the_pipe_is_full(warps):
    total = cycles([ins(CHAIN, 4)] * 100, warps=warps)
    assert total == pytest.approx(max(4, 2 * warps) * 100, rel=0.02)
    total = cycles([ins(CHAIN, 4)] * 100, warps=warps, sm=90)
    assert total == pytest.approx(max(4, warps) * 100, rel=0.02)


def test_different_pipes_run_side_by_side():
    mixed = [ins("FFMA R0, R0, R1, R2"), ins("LOP3.LUT R4, R4, R5, R6")] * 50
    assert cycles(mixed) == pytest.approx(100, abs=2)
    assert cycles([mixed[0]] * 100) == pytest.approx(200, abs=2)


def test_a_consumer_waits_for_the_modelled_latency_of_a_shared_load():
    load = ins("LDS R0, [R4]", 2, write=1)
    used = ins("FADD R1, R0, R0", 1, wait=1 << 1)
    assert cycles([load, used]) == SM80.latency_shared + 1
    assert cycles([load, replace(used, control=used.control.with_(wait=0))]) == 3


def test_independent_work_hides_a_load():
    load = ins("LDS R0, [R4]", 2, write=1)
    used = ins("FADD R1, R0, R0", 1, wait=1 << 1)
    work = [ins(CHAIN, 4)] * 5
    assert cycles([load, *work, used]) == SM80.latency_shared + 1
    assert cycles([load, used, *work]) == SM80.latency_shared + SM80.issue_fma + 20


def test_the_read_scoreboard_is_released_before_the_write_scoreboard():
    load = ins("LDG.E R0, [R4]", 2, write=0, read=1)
    early = cycles([load, ins("MOV R4, R5", 1, wait=1 << 1)])
    late = cycles([load, ins("MOV R4, R5", 1, wait=1 << 0)])
    assert early == SM80.read_delay + 1
    assert late == SM80.latency_global + 1


def test_a_scoreboard_counts_all_its_users():
    loads = [ins(f"LDS R{i}, [R8]", 2, write=0) for i in range(3)]
    used = ins("FADD R1, R0, R0", 1, wait=1)
    service = 4  # 128 bytes at 128 bytes per cycle and SM, shared by four sub-cores
    assert cycles([*loads, used]) == 2 * service + SM80.latency_shared + 1


@pytest.mark.parametrize(("allowed", "groups"), [(0, 3), (1, 2), (2, 1), (3, 0)])
def test_depbar_waits_until_few_enough_copies_are_pending(allowed, groups):
    copies = [
        part
        for _ in range(3)
        for part in (ins("LDGSTS.E.128 [R8], [R4]", 2), ins("LDGDEPBAR", 2, write=0))
    ]
    sm_model, state = model([*copies, ins(f"DEPBAR.LE SB0, {allowed:#x}"), ins("MOV R0, R1")])
    costs = sm_model._costs[0]
    last = sm_model.timeline(state)[-1].cycle
    if groups:
        assert last == (groups - 1) * costs[3] + costs[4] + 1
    else:
        assert last == 13


def test_depbar_on_a_set_waits_for_each_of_its_scoreboards():
    load = ins("LDS R0, [R4]", 2, write=3)
    assert cycles([load, ins("DEPBAR {5,4,3,2,1,0}")]) == SM80.latency_shared + 1
    assert cycles([load, ins("DEPBAR {5,4,2}")]) == 3


CLASH = "FFMA R0, R2, R4, R6"
SPREAD = "FFMA R0, R2, R5, R6"


def test_three_operands_of_one_bank_cost_a_cycle():
    assert cycles([ins(SPREAD)] * 100, sm=90) == 100
    assert cycles([ins(CLASH)] * 100, sm=90) == 199
    assert cycles([ins(CLASH)] * 100) == 99 * 3 + 1


def test_a_reused_operand_avoids_the_conflict():
    reused = [ins(CLASH, reuse=0b001)] * 100
    assert cycles(reused, sm=90) == 101  # only the first, without a predecessor, has a conflict
    differing = [ins("FFMA R0, R8, R4, R6", reuse=0b001), ins(CLASH, reuse=0b001)] * 50
    assert cycles(differing, sm=90) == 199


def test_an_issue_of_another_warp_empties_the_operand_cache():
    # Two warps alternate, so neither finds its operand in the cache.
    reused = [ins(CLASH, 4, reuse=0b001)] * 50
    assert sum(model(reused, warps=1, sm=90)[0].explain(model(reused, sm=90)[1]).cycles[:, 5]) == 0
    sm_model, state = model(reused, warps=8, sm=90)
    assert sm_model.explain(state).by_reason["bank conflict"] > 0


def test_the_scheduler_is_greedy_unless_a_warp_yields():
    greedy, state = model([ins("NOP")] * 6, warps=2)
    assert [issue.warp for issue in greedy.timeline(state)] == [1] * 6 + [0] * 6
    yielding, state = model([ins("NOP", yields=True)] * 6, warps=2)
    assert [issue.warp for issue in yielding.timeline(state)] == [1, 0] * 6


def test_yield_at_every_instruction_halves_the_issue_rate():
    plain = cycles([ins("NOP")] * 400, warps=2)
    assert plain == 800
    assert cycles([ins("NOP", yields=True)] * 400, warps=2) / plain == pytest.approx(2, rel=0.01)


def test_drain_costs_more_than_any_stall():
    assert cycles([ins("NOP", 0, yields=True)] * 10) == 10 * SM80.drain


@pytest.mark.parametrize("opcode", ["BAR.SYNC 0x0", "BAR.SYNC.DEFER_BLOCKING 0x0"])
def test_a_barrier_holds_the_warps_until_the_last_arrives(opcode):
    launch = LaunchSpec(block=(256, 1, 1))
    code = [ins(CHAIN, 4)] * 5 + [ins(opcode), ins("LDS R0, [R4]", 2)]
    sm_model, state = model(code, launch=launch, warps=2)
    issues = sm_model.timeline(state)
    arrivals = [i.cycle for i in issues if i.position == 5]
    loads = [i.cycle for i in issues if i.position == 6]
    assert min(loads) == max(arrivals) + SM80.barrier
    assert {i.reason for i in issues if i.position == 6} <= {Reason.BARRIER, Reason.PIPE_BUSY}


def test_only_memory_waits_for_a_deferred_barrier():
    after = ins("FADD R0, R1, R2")
    assert cycles([ins("BAR.SYNC.DEFER_BLOCKING 0x0"), after]) == 2
    assert cycles([ins("BAR.SYNC 0x0"), after]) == SM80.barrier + 1


def test_blocks_do_not_share_barriers():
    launch = LaunchSpec(block=(128, 1, 1), grid=(216, 1, 1))
    code = [ins("NOP"), ins("BAR.SYNC 0x0"), ins("NOP")]
    sm_model, state = model(code, launch=launch, warps=None)
    assert sm_model.simulated_warps == 2
    last = {i.warp: i.cycle for i in sm_model.timeline(state)}
    assert last == {1: 1 + SM80.barrier, 0: 3 + SM80.barrier}


def test_the_occupancy_of_a_matrix_instruction_follows_its_shape():
    chain = [ins("HMMA.16816.F32 R0, R4, R8, R0")] * 20
    assert cycles(chain) == 19 * 8 + 1
    assert cycles([ins("HMMA.1688.F32 R0, R4, R8, R0")] * 20) == 19 * 4 + 1
    assert cycles(chain, sm=86) == 19 * 32 + 1


def test_warp_group_products_are_asynchronous():
    product = ins("HGMMA.64x128x16.F32 R24, gdesc[UR8], R24, gsb0")
    wait = ins("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    assert cycles([product, product], sm=90) == 2
    service = 64 // 4 * 128 * 16 // 512
    expected = 2 * service + PARAMETERS[90].latency_gmma + 1
    assert cycles([product, product, wait], sm=90) == expected


def test_an_instruction_that_never_executes_only_takes_a_slot():
    assert cycles([ins("@!PT LDS RZ, [RZ]")] * 10) == 10


def test_a_longer_stall_is_never_faster_for_one_warp():
    rng = np.random.default_rng(3)
    kinds = [CHAIN, "LOP3.LUT R4, R4, R5, R6", "MUFU.RCP R7, R7", CLASH, "NOP"]
    for _ in range(30):
        code = [ins(kinds[k], int(rng.integers(1, 8))) for k in rng.integers(0, 5, 40)]
        code.insert(10, ins("LDS R9, [R8]", 2, write=0))
        code.insert(25, ins("FADD R1, R9, R9", 2, wait=1))
        sm_model, state = model(code)
        at = int(rng.integers(len(code)))
        stall = state.stall.copy()
        stall[at] += int(rng.integers(1, 5))
        assert sm_model.cycles(replace(state, stall=stall)) >= sm_model.cycles(state)


def test_reasons_add_up_to_the_time_of_the_warps():
    code = [ins("LDS R0, [R4]", 2, write=0), ins("FADD R1, R0, R0", 4, wait=1)]
    code += [ins(CLASH)] * 10 + [ins("BAR.SYNC 0x0", 3), ins("LDS R2, [R4]", 5)]
    sm_model, state = model(code)
    explanation = sm_model.explain(state)
    assert explanation.cycles.sum() == sm_model.cycles(state) == explanation.wave_cycles
    assert explanation.cycles[1, Reason.SCOREBOARD] == SM80.latency_shared - 2
    assert explanation.cycles[5, Reason.BANK_CONFLICT] == 1
    assert explanation.cycles[13, Reason.BARRIER] == SM80.barrier - 3
    assert explanation.worst(1)[0] in [(1, 22.0, "scoreboard"), (13, 23.0, "barrier")]
    sm_model, state = model(code, warps=3)
    explanation = sm_model.explain(state)
    assert explanation.by_reason["issued"] == 3 * len(code)
    assert explanation.cycles.sum() <= 3 * explanation.wave_cycles
