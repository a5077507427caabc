"""Passes of a stage whose operations share weights."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="execution needs the extra nostall[torch]")

from torch import nn  # noqa: E402

from nostall.parallel.execute.engines.stage_passes import StagePasses  # noqa: E402
from nostall.parallel.module import Job, Model  # noqa: E402


class Tied(nn.Module):
    """Operations that share a weight, or what is computed from it, in a nested graph or not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.shared, self.between = kind, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values: Any) -> Any:
        if self.kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self.run(values, self.shared.weight)
        weight = self.shared.weight
        return self.run(values, weight.t() if self.kind == "computed" else weight)

    def run(self, values: Any, weight: Any) -> Any:
        hidden = self.between(nn.functional.linear(values, weight).tanh()).tanh()
        return nn.functional.linear(hidden, weight)


@pytest.mark.parametrize("kind", ["weight", "computed", "autocast"])
def test_a_split_backward_pass_of_shared_weights_has_all_gradients(kind: str) -> None:
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    module = nn.Sequential(first, nn.Tanh(), Tied(kind))
    inputs, targets = torch.randn(4, 4), torch.randn(4, 4)
    model = Model(Job(module, (inputs,), targets, nn.functional.mse_loss))
    segment = model.segment(1, len(model), 4, torch.device("cpu"))
    (name,) = segment.received
    passes = StagePasses(model.stage_parameters(1, len(model)), recompute=False)
    received = {name: first(inputs).detach()}
    passes.forward(0, segment, received, ((inputs,), targets), 1.0)
    sent = passes.backward_inputs(0, {})
    passes.backward_weights(0)
    found = [p.grad for p in passes.parameters]
    leaf = received[name].requires_grad_()
    loss = nn.functional.mse_loss(module[1:](leaf), targets)
    expected = torch.autograd.grad(loss, [leaf, *passes.parameters], allow_unused=True)
    for own, value in zip([sent[name], *found], expected, strict=True):
        torch.testing.assert_close(own, value, rtol=1e-2, atol=1e-3)
