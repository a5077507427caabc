"""Features of PyTorch modules, compared with closed forms; needs the extra nostall[torch]."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch", reason="module features need the extra nostall[torch]")

from nostall.core import BadJob, MissingPart  # noqa: E402
from nostall.workload import Architecture, load_hardware, model_step  # noqa: E402
from nostall.workload.jobs.record import OperatorKind  # noqa: E402
from nostall.workload.modules import job_from_features, module_features  # noqa: E402
from nostall.workload.modules.operator_counter import operator_kind  # noqa: E402


def test_linear_layer() -> None:
    layer = torch.nn.Linear(128, 64, bias=False)
    batch = torch.zeros(32, 128)
    forward_flops = 2 * 32 * 128 * 64
    forward = module_features(layer, [batch], training=False)
    assert forward.flops == forward_flops
    assert forward.product_bytes == 4 * (32 * 128 + 128 * 64 + 32 * 64)
    assert forward.memory_bytes == 0
    # Backward computes the gradient of the weights, and that of the input if it is required.
    assert module_features(layer, [batch]).flops == 2 * forward_flops
    assert module_features(layer, [batch.requires_grad_()]).flops == 3 * forward_flops
    assert (forward.dense_bytes, forward.input_bytes) == (4 * 128 * 64, 4 * 32 * 128)


def test_convolution() -> None:
    layer = torch.nn.Conv2d(16, 32, 3, padding=1, bias=False)
    features = module_features(layer, [torch.zeros(4, 16, 20, 20)], training=False)
    assert features.flops == 2 * 4 * 32 * 20 * 20 * 16 * 9


def test_embeddings_count_the_rows_that_are_looked_up() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 16), torch.nn.Linear(16, 4))
    features = module_features(model, [torch.zeros(8, 5, dtype=torch.long)], training=False)
    assert features.embedding_bytes == 1000 * 16 * 4
    assert features.touched_bytes == 8 * 5 * 16 * 4
    assert features.dense_bytes == (16 * 4 + 4) * 4
    lookup = next(o for o in features.operators if "embedding" in o.name)
    assert lookup.bytes_moved == 2 * 8 * 5 * 16 * 4 + 8 * 5 * 8


def test_views_move_no_bytes() -> None:
    class ReluPlusOne(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x.view(-1)) + 1.0

    features = module_features(ReluPlusOne(), [torch.zeros(10, 100)], training=False)
    assert features.memory_bytes == 2 * 2 * 4 * 1000
    assert features.flops == 0


def test_nothing_is_computed_and_the_module_is_not_changed() -> None:
    """A model of 400 GB on the meta device has features; a real model keeps its weights."""
    with torch.device("meta"):
        large = torch.nn.Linear(300_000, 330_000, bias=False)
    features = module_features(large, [torch.zeros(2, 300_000, device="meta")])
    assert features.dense_bytes == 4 * 300_000 * 330_000
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    module_features(model, [torch.randn(4, 8)])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_submodule_with_two_names_keeps_its_parameters() -> None:
    layer = torch.nn.Linear(4, 4)
    weight = layer.weight
    module_features(torch.nn.Sequential(layer, torch.nn.ReLU(), layer), (torch.randn(2, 4),))
    assert layer.weight is weight


def test_half_precision_keyword_inputs_and_a_loss() -> None:
    layer = torch.nn.Linear(8, 8).to(torch.bfloat16)
    batch = {"input": torch.zeros(2, 8, dtype=torch.bfloat16)}
    features = module_features(layer, batch, loss=lambda out: out.float().pow(2).mean())
    assert features.precision == "bf16"
    assert features.flops == 2 * 2 * 2 * 8 * 8


def test_the_job_of_a_transformer_can_be_modelled() -> None:
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    features = module_features(layer, [torch.zeros(8, 64, 256)])
    tokens, parameters = 8 * 64, 256 * 256 * 4 + 2 * 256 * 1024
    products = 6 * tokens * parameters - 2 * tokens * 256 * 3 * 256  # input needs no gradient
    attention = 3 * 2 * (2 * 8 * 4 * 64 * 64 * 64)
    assert features.flops == pytest.approx(products + attention, rel=0.05)
    job = job_from_features(features, "encoder", Architecture.ALLREDUCE_LOCAL, replicas=8, batch=8)
    step = model_step(job, load_hardware("h200-dgx"))
    assert step.weights == pytest.approx(1.75 * features.dense_bytes / (0.7 * 450e9))


def test_modules_that_cannot_be_counted_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(8, 8)
    with pytest.raises(BadJob, match="cannot be traced"):
        module_features(layer, [torch.zeros(2, 9)])
    with pytest.raises(BadJob, match="does no work"):
        job_from_features(
            module_features(torch.nn.Identity(), [torch.zeros(2)], training=False),
            "nothing",
            Architecture.SINGLE,
        )
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPart, match=r"nostall\[torch\]"):
        module_features(layer, [torch.zeros(2, 8)])


def test_attention_on_cpu_is_counted_and_causal_attention_is_half() -> None:
    class Attention(torch.nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.causal = causal

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=self.causal)

    batch = torch.zeros(2, 4, 64, 32, requires_grad=True)
    full_flops = 2 * 2 * 2 * 4 * 64 * 64 * 32
    [full] = module_features(Attention(False), [batch], training=False).operators
    assert (full.kind, full.flops) == (OperatorKind.ATTENTION, full_flops)
    [causal] = module_features(Attention(True), [batch], training=False).operators
    assert causal.flops == full_flops / 2
    assert module_features(Attention(False), [batch]).flops == pytest.approx(full_flops * 3.5)


def test_calls_with_equal_flops_and_bytes_are_grouped() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(n, 8, bias=False) for n in (8, 8, 8)))
    features = module_features(layers, [torch.zeros(4, 8)], training=False)
    assert [(o.calls, o.flops) for o in features.operators] == [(3, 3 * 2 * 4 * 8 * 8)]
    mixed = torch.nn.Sequential(torch.nn.Linear(16, 8, bias=False), layers)
    features = module_features(mixed, [torch.zeros(4, 16)], training=False)
    assert sorted(o.calls for o in features.operators) == [1, 3]


@pytest.mark.parametrize(
    ("name", "flops", "kind"),
    [
        ("aten.mm.default", 1.0, OperatorKind.PRODUCT),
        ("aten._scaled_dot_product_cudnn_attention.default", 1.0, OperatorKind.ATTENTION),
        ("aten.convolution_backward.default", 1.0, OperatorKind.CONVOLUTION),
        ("aten.native_layer_norm_backward.default", 0.0, OperatorKind.NORMALISATION),
        ("aten.cudnn_batch_norm.default", 0.0, OperatorKind.NORMALISATION),
        ("aten._log_softmax_backward_data.default", 0.0, OperatorKind.NORMALISATION),
        ("aten.embedding_dense_backward.default", 0.0, OperatorKind.EMBEDDING),
        ("aten.sum.dim_IntList", 0.0, OperatorKind.REDUCTION),
        ("aten.max_pool2d_with_indices.default", 0.0, OperatorKind.REDUCTION),
        ("aten.normal_.default", 0.0, OperatorKind.ELEMENTWISE),
        ("aten.threshold_backward.default", 0.0, OperatorKind.ELEMENTWISE),
        ("aten._to_copy.default", 0.0, OperatorKind.ELEMENTWISE),
    ],
)
def test_operator_kinds(name: str, flops: float, kind: OperatorKind) -> None:
    assert operator_kind(name, flops) is kind
