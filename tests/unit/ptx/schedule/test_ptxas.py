"""ptxas assembles random orders, without new messages about wgmma and tcgen05."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nostall.ptx.assemble.builder import loss_codes, new_codes
from nostall.ptx.assemble.command import plain_command
from nostall.ptx.assemble.ptxas import PtxasRun, run_ptxas
from nostall.ptx.assemble.versions import find_assemblers
from nostall.ptx.program.blocks import Block
from nostall.ptx.program.module import parse
from nostall.ptx.program.resources import Reference, Resource
from nostall.ptx.schedule.space import PtxSpace, build_graph, random_order
from nostall.ptx.schedule.state import PtxState
from nostall.sass.safety import validate
from tests.unit.ptx.ptx_texts import corpus

NEWEST = max(find_assemblers(), key=lambda a: tuple(map(int, a.version.split("."))))
KERNELS = (
    ("fused_attention.sm_90", 2),
    ("gemm_leakyrelu.sm_100", 1),
    ("nvcc-hopper.sm_90a", 1),
    ("inline_assembly.sm_90", 2),
    ("prints.sm_80", 2),
)


def assemble(text: str, folder: Path) -> PtxasRun:
    run = run_ptxas(NEWEST, text, plain_command(text).arguments(), folder)
    assert run.status == "assembled", run.detail
    return run


@pytest.mark.parametrize(("name", "orders"), KERNELS)
def test_random_orders_assemble_like_the_original(name: str, orders: int, tmp_path: Path) -> None:
    text = corpus(name)
    found = parse(text)
    own = PtxSpace(found, found.kernels[0].name)
    original = assemble(text, tmp_path)
    for seed in range(orders):
        state = own.reorder(own.start(), np.random.default_rng(seed), 20.0)
        run = assemble(own.text(state), tmp_path)
        assert not new_codes(run.messages, original.messages)
        assert run.cubin != original.cubin


def test_ptxas_tells_an_order_without_the_rule_of_wgmma(tmp_path: Path) -> None:
    """The check above can fail: without the rule, ptxas serialises or adds waits."""
    own = PtxSpace(parse(corpus("fused_attention.sm_90")))
    rng = np.random.default_rng(0)
    orders = [random_order(build_graph(without_wgmma(b)), range(len(b)), rng, 6.0)
              for b in own.blocks]  # fmt: skip
    assert loss_codes(assemble(own.text(PtxState(orders=tuple(orders))), tmp_path).messages)


def without_wgmma(block: Block) -> Block:
    """The block, with waits and fences of wgmma that order no registers."""
    hidden: frozenset[Reference] = frozenset((Resource.WGMMA,))
    units = (replace(u, reads=u.reads - hidden, writes=u.writes - hidden) for u in block.units)
    return replace(block, units=tuple(units))


def test_the_verifier_knows_loads_that_reduce_over_gpus(tmp_path: Path) -> None:
    assert validate(assemble(corpus("nvcc-multimem.sm_90"), tmp_path).cubin).safe


def test_settings_assemble(tmp_path: Path) -> None:
    text = corpus("gemm_leakyrelu.sm_80")
    own = PtxSpace(parse(text))
    index = next(i.index for i in own.kernel.instructions if i.opcode.startswith("cp.async.cg"))
    state = PtxState(kernel_name="cutlass_gemm", max_registers=80, hints=((index, "L2::128B"),))
    assert b"cutlass_gemm" in assemble(own.text(state), tmp_path).cubin


def test_the_wait_of_a_dependent_launch_assembles(tmp_path: Path) -> None:
    own = PtxSpace(parse(corpus("inline_assembly.sm_90")))
    waiting = assemble(own.text(PtxState(dependent_launch="wait+trigger")), tmp_path)
    assert waiting.cubin != assemble(own.text(own.start()), tmp_path).cubin
