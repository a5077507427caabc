"""Trains two modules that call each other, with marked CUDA graphs beside the originals."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

from nostall.attach.program import shadow
from nostall.attach.program.changes import MARKED, Compile
from nostall.attach.program.roots import Switch

nn = torch.nn


def play(c: Any, m: Any, of_c: Any, of_m: Any, real: Any, noise: Any) -> None:
    """A step in which gradients of two losses are added up."""
    c.zero_grad()
    c(real).mean().backward()
    made = m(noise)
    (-c(made.detach()).mean()).backward()
    of_c.step()
    m.zero_grad()
    c(made).square().mean().backward()
    of_m.step()


torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
maker = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
twins = copy.deepcopy((critic, maker))
pairs = []
for modules in ((critic, maker), twins):
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in modules]
    pairs.append((*modules, *optimizers))
switches = [Switch(m, [], lambda *_: None) for m in (critic, maker)]
for number, switch in enumerate(switches):
    switch.number = number
data = [(torch.randn(32, 64, device="cuda"), torch.randn(32, 16, device="cuda"))
        for _ in range(4)]  # fmt: skip
for pair in pairs:
    play(*pair, *data[0])
change = Compile(switches, MARKED, pairs[0][3])
if "--check" in sys.argv:
    seen = {n: [shadow.Call((data[0][n],), {}, True, True, None)] for n in (0, 1)}
    assert change.check(seen).refusal == ""
change.on()
for at in range(12):
    for pair in pairs:
        play(*pair, *data[at % 4])
assert [switch.failure for switch in switches] == [None, None], [s.failure for s in switches]
mine = *critic.parameters(), *maker.parameters()
for one, other in zip(mine, (p for m in twins for p in m.parameters()), strict=True):
    assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)
