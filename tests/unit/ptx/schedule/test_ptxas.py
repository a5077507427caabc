"""ptxas assembles random orders, without new messages about wgmma and tcgen05 (C7510 to C7519)."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nostall.ptx.program.blocks import Block
from nostall.ptx.program.module import parse
from nostall.ptx.program.resources import Reference, Resource
from nostall.ptx.schedule.graph import build_graph
from nostall.ptx.schedule.orders import random_order
from nostall.ptx.schedule.space import PtxSpace
from nostall.ptx.schedule.state import PtxState
from nostall.tuning.ptxas_versions import find_assemblers
from tests.unit.ptx.ptx_texts import corpus

NEWEST = max(find_assemblers(), key=lambda a: tuple(map(int, a.version.split("."))))
KERNELS = (
    ("fused_attention-wgmma.sm_90", 2),
    ("gemm_leakyrelu.sm_100", 1),
    ("hopper.sm_90a", 1),
    ("inline_assembly.sm_90", 2),
    ("prints.sm_90", 2),
)


def messages(text: str, folder: Path) -> Counter[str]:
    """Codes of ptxas's messages that a wrong order of asynchronous instructions causes."""
    target = parse(text).target
    source, cubin = folder / "k.ptx", folder / "k.cubin"
    source.write_text(text)
    command = [str(NEWEST.path), f"--gpu-name={target}", str(source), "-o", str(cubin)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    return Counter(re.findall(r"\(C751\d\)", output))


@pytest.mark.parametrize(("name", "orders"), KERNELS)
def test_random_orders_assemble_like_the_original(name: str, orders: int, tmp_path: Path) -> None:
    text = corpus(name)
    own = PtxSpace(parse(text), parse(text).kernels[0].name)
    allowed = messages(text, tmp_path)
    cubins = {(tmp_path / "k.cubin").read_bytes()}
    for seed in range(orders):
        state = own.reorder(own.start(), np.random.default_rng(seed), 20.0)
        assert messages(own.text(state), tmp_path) == allowed
        cubins.add((tmp_path / "k.cubin").read_bytes())
    assert len(cubins) > 1


def test_ptxas_tells_an_order_without_the_rule_of_wgmma(tmp_path: Path) -> None:
    """The check above can fail: without the rule, ptxas serialises or adds waits."""
    own = PtxSpace(parse(corpus("fused_attention-wgmma.sm_90")))
    rng = np.random.default_rng(0)
    orders = [random_order(build_graph(without_wgmma(b)), range(len(b)), rng, 6.0)
              for b in own.blocks]  # fmt: skip
    assert messages(own.text(PtxState(orders=tuple(orders))), tmp_path)


def without_wgmma(block: Block) -> Block:
    """The block, with waits and fences of wgmma that order no registers."""
    hidden: frozenset[Reference] = frozenset((Resource.WGMMA,))
    units = (replace(u, reads=u.reads - hidden, writes=u.writes - hidden) for u in block.units)
    return replace(block, units=tuple(units))


def test_settings_assemble(tmp_path: Path) -> None:
    text = corpus("gemm_leakyrelu-mma32.sm_80")
    own = PtxSpace(parse(text))
    index = next(i.index for i in own.kernel.instructions if i.opcode.startswith("cp.async.cg"))
    state = PtxState(kernel_name="cutlass_gemm", max_registers=80, hints=((index, "L2::128B"),))
    messages(own.text(state), tmp_path)
    assert b"cutlass_gemm" in (tmp_path / "k.cubin").read_bytes()
