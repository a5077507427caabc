"""Passes of a stage whose operations share weights."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="execution needs the extra nostall[torch]")

from torch import nn  # noqa: E402

from nostall.parallel.execute.engines.stage_passes import StagePasses  # noqa: E402
from nostall.parallel.module import Job, Model  # noqa: E402


def test_a_split_backward_pass_of_shared_weights_has_all_gradients() -> None:
    torch.manual_seed(0)
    layer, first, between = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    module = nn.Sequential(first, nn.Tanh(), layer, nn.Tanh(), between, nn.Tanh(), layer).double()
    inputs, targets = torch.randn(4, 4).double(), torch.randn(4, 4).double()
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
    expected = torch.autograd.grad(loss, [leaf, *passes.parameters])
    for own, value in zip([sent[name], *found], expected, strict=True):
        torch.testing.assert_close(own, value)
