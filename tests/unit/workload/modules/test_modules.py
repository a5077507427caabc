"""Features of modules against closed forms; needs PyTorch (the extra nostall[torch])."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch", reason="describing modules needs the extra nostall[torch]")

from nostall.core import BadJob, MissingPart  # noqa: E402
from nostall.workload import Architecture, load_hardware, step  # noqa: E402
from nostall.workload.jobs.operators import OperatorKind  # noqa: E402
from nostall.workload.modules import job_of, module_features  # noqa: E402
from nostall.workload.modules.classes import kind_of_operator  # noqa: E402


def test_a_linear_layer_in_closed_form() -> None:
    layer = torch.nn.Linear(128, 64, bias=False)
    batch = torch.zeros(32, 128)
    once = 2 * 32 * 128 * 64
    forward = module_features(layer, [batch], training=False)
    assert forward.flops == once
    assert forward.product_bytes == 4 * (32 * 128 + 128 * 64 + 32 * 64)
    assert forward.memory_bytes == 0
    # Backward: the gradient of the weights; that of the input is not asked for.
    assert module_features(layer, [batch]).flops == 2 * once
    assert module_features(layer, [batch.requires_grad_()]).flops == 3 * once
    assert (forward.dense_bytes, forward.input_bytes) == (4 * 128 * 64, 4 * 32 * 128)


def test_a_convolution_in_closed_form() -> None:
    layer = torch.nn.Conv2d(16, 32, 3, padding=1, bias=False)
    found = module_features(layer, [torch.zeros(4, 16, 20, 20)], training=False)
    assert found.flops == 2 * 4 * 32 * 20 * 20 * 16 * 9


def test_embeddings_are_counted_by_the_rows_that_are_looked_up() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 16), torch.nn.Linear(16, 4))
    found = module_features(model, [torch.zeros(8, 5, dtype=torch.long)], training=False)
    assert found.embedding_bytes == 1000 * 16 * 4
    assert found.touched_bytes == 8 * 5 * 16 * 4
    assert found.dense_bytes == (16 * 4 + 4) * 4
    lookup = next(o for o in found.operators if "embedding" in o.name)
    assert lookup.size == 2 * 8 * 5 * 16 * 4 + 8 * 5 * 8


def test_elementwise_operators_read_and_write_and_views_do_not() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x.view(-1)) + 1.0

    found = module_features(Twice(), [torch.zeros(10, 100)], training=False)
    assert found.memory_bytes == 2 * 2 * 4 * 1000
    assert found.flops == 0


def test_nothing_is_computed_and_nothing_is_changed() -> None:
    """A model of 400 GB on the meta device is described; a real one keeps its weights."""
    with torch.device("meta"):
        large = torch.nn.Linear(300_000, 330_000, bias=False)
    found = module_features(large, [torch.zeros(2, 300_000, device="meta")])
    assert found.dense_bytes == 4 * 300_000 * 330_000
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    module_features(model, [torch.randn(4, 8)])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_half_precision_named_inputs_and_a_loss() -> None:
    layer = torch.nn.Linear(8, 8).to(torch.bfloat16)
    batch = {"input": torch.zeros(2, 8, dtype=torch.bfloat16)}
    found = module_features(layer, batch, loss=lambda out: out.float().pow(2).mean())
    assert found.precision == "bf16"
    assert found.flops == 2 * 2 * 2 * 8 * 8


def test_a_transformer_gives_a_job_that_the_model_takes() -> None:
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    found = module_features(layer, [torch.zeros(8, 64, 256)])
    tokens, parameters = 8 * 64, 256 * 256 * 4 + 2 * 256 * 1024
    products = 6 * tokens * parameters - 2 * tokens * 256 * 3 * 256  # input needs no gradient
    attention = 3 * 2 * (2 * 8 * 4 * 64 * 64 * 64)
    assert found.flops == pytest.approx(products + attention, rel=0.05)
    job = job_of(found, "encoder", Architecture.ALLREDUCE_LOCAL, replicas=8, batch=8)
    modelled = step(job, load_hardware("h200-dgx"))
    assert modelled.weights == pytest.approx(1.75 * found.dense_bytes / (0.7 * 450e9))


def test_what_cannot_be_described_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(8, 8)
    with pytest.raises(BadJob, match="cannot be traced"):
        module_features(layer, [torch.zeros(2, 9)])
    with pytest.raises(BadJob, match="does no work"):
        job_of(
            module_features(torch.nn.Identity(), [torch.zeros(2)], training=False),
            "nothing",
            Architecture.SINGLE,
        )
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPart, match=r"nostall\[torch\]"):
        module_features(layer, [torch.zeros(2, 8)])


def test_attention_is_counted_on_a_processor_too_and_half_of_it_where_it_is_causal() -> None:
    class Attention(torch.nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.causal = causal

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=self.causal)

    batch = torch.zeros(2, 4, 64, 32, requires_grad=True)
    once = 2 * 2 * 2 * 4 * 64 * 64 * 32
    [only] = module_features(Attention(False), [batch], training=False).operators
    assert (only.kind, only.flops) == (OperatorKind.ATTENTION, once)
    [half] = module_features(Attention(True), [batch], training=False).operators
    assert half.flops == once / 2
    assert module_features(Attention(False), [batch]).flops == pytest.approx(once * 3.5)


def test_calls_with_the_same_amounts_are_one_operator_and_others_are_not() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(n, 8, bias=False) for n in (8, 8, 8)))
    found = module_features(layers, [torch.zeros(4, 8)], training=False)
    assert [(o.calls, o.flops) for o in found.operators] == [(3, 3 * 2 * 4 * 8 * 8)]
    both = torch.nn.Sequential(torch.nn.Linear(16, 8, bias=False), layers)
    found = module_features(both, [torch.zeros(4, 16)], training=False)
    assert sorted(o.calls for o in found.operators) == [1, 3]


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
def test_kinds_of_operators(name: str, flops: float, kind: OperatorKind) -> None:
    assert kind_of_operator(name, flops) is kind
