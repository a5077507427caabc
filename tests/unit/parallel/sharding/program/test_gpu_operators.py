"""Steps that are traced for CPUs, on another device: operators are replaced, devices as well.

Tensors on the meta device have shapes and no values, so these tests need no GPU; ``python -m
benchmarks run sharding.gpu_plans`` compares values on GPUs.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="programs need the extra nostall[torch]")
pytest.importorskip("transformers", reason="models need the extra nostall[torch-tests]")

from benchmarks.sharding.local_devices import LocalDevices  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from nostall.parallel.errors import BadPlan  # noqa: E402
from nostall.parallel.sharding.graph import replicated  # noqa: E402
from nostall.parallel.sharding.program.local_operator import (  # noqa: E402
    CUDNN_OPERATORS,
    GPU_OPERATORS,
)
from nostall.parallel.sharding.program.program import ShardedProgram  # noqa: E402
from tests.unit.parallel.sharding.steps import SAMPLES, captured, job  # noqa: E402

_aten = torch.ops.aten
ATTENTION = GPU_OPERATORS[_aten._scaled_dot_product_flash_attention_for_cpu.default]
BACKWARD = GPU_OPERATORS[_aten._scaled_dot_product_flash_attention_for_cpu_backward.default]
META = torch.device("meta")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_has_the_shapes_of_the_operator_for_cpus(dtype: object, masked: bool) -> None:
    query, key, value = (torch.empty(2, 4, 24, 16, dtype=dtype, device=META) for _ in range(3))
    mask = torch.empty(2, 1, 24, 24, dtype=dtype, device=META) if masked else None
    output, sums = ATTENTION(query, key, value, 0.0, not masked, attn_mask=mask)
    gradients = BACKWARD(
        output, query, key, value, output, sums, 0.0, not masked, attn_mask=mask, scale=0.25
    )
    assert output.shape == query.shape and sums.shape[:2] == query.shape[:2]
    assert [g.shape for g in gradients] == [query.shape] * 3


def test_attention_of_cudnn_has_the_same_shapes() -> None:
    query, key, value = (torch.empty(2, 4, 24, 16, dtype=torch.bfloat16, device=META),) * 3
    forward, backward = CUDNN_OPERATORS.values()
    output, sums = forward(query, key, value, 0.0, True)
    gradients = backward(
        output, query, key, value, output, sums, 0.0, True, attn_mask=None, scale=0.25
    )
    assert output.shape == query.shape and sums.shape == query.shape[:3]
    assert [g.shape for g in gradients] == [query.shape] * 3


@pytest.mark.parametrize(("dtype", "dropout"), [("float64", 0.0), ("float32", 0.1)])
def test_attention_without_a_kernel_is_refused(dtype: str, dropout: float) -> None:
    query = torch.empty(1, 1, 8, 8, dtype=getattr(torch, dtype), device=META)
    with pytest.raises(BadPlan, match="attention"):
        ATTENTION(query, query, query, dropout, False)


def test_a_step_runs_on_another_device() -> None:
    """The classifier has constants and operators that create tensors on the traced device."""
    step, own = captured("wide_classifier", 2), job("wide_classifier")
    program = ShardedProgram(step, replicated(step.graph), LocalDevices((2,)), META)
    parameters = {n: [p.detach().to(META)] * 2 for n, p in own.module.named_parameters()}
    leaves = [leaf.to(META) for leaf in tree_leaves(own.example_batch(SAMPLES))]
    result = program.run(parameters, {}, leaves)
    assert all(value.device == META for value in result.loss)
    assert {n: v[0].shape for n, v in result.gradients.items()} == {
        n: p.shape for n, p in own.module.named_parameters()
    }
