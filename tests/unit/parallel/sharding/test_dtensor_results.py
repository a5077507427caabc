"""Results of exported steps on two ranks, operator by operator, against one process.

The exported text decides which operators DTensor may shard.  A fault of another version of PyTorch
makes these tests fail.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")
pytest.importorskip("scipy", reason="planning needs the extra nostall[sharding]")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from nostall.parallel.errors import BadModel  # noqa: E402
from nostall.parallel.module import Job  # noqa: E402
from nostall.parallel.sharding.style_export import replicated_operators  # noqa: E402
from tests.unit.parallel.sharding.test_style_export import export_job  # noqa: E402
from tests.unit.parallel.sharding.threads import run_on_threads  # noqa: E402

SAMPLES, FEATURES = 8, 6
Loss = Callable[..., Any]
_GENERATOR = torch.Generator().manual_seed(0)
REAL = torch.randn(SAMPLES, FEATURES, generator=_GENERATOR).double()
OTHER = torch.randn(SAMPLES, FEATURES, generator=_GENERATOR).double()
SIGNS = torch.where(OTHER > 0, 1.0, -1.0).double()
CLASSES = torch.randint(0, FEATURES, (SAMPLES,), generator=_GENERATOR)
BINARY = (OTHER > 0).double()
MULTI_LABEL = torch.cat([CLASSES[:, None], -torch.ones(SAMPLES, FEATURES - 1).long()], 1)
WEIGHTS = torch.linspace(0.1, 3.0, FEATURES).double()


def _ctc(output: Any, targets: Any, reduction: str) -> Any:
    logarithms = output.log_softmax(-1).unsqueeze(0).expand(4, -1, -1)
    lengths = (4,) * SAMPLES, (1,) * SAMPLES
    return F.ctc_loss(logarithms, 1 + targets[:, None] % 5, *lengths, reduction=reduction)


LOSSES: dict[str, tuple[Loss, Any]] = {
    "binary_cross_entropy": (
        lambda o, t, r: F.binary_cross_entropy(o.sigmoid(), t, reduction=r), BINARY),
    "binary_cross_entropy_with_logits": (
        lambda o, t, r: F.binary_cross_entropy_with_logits(
            o, t, weight=WEIGHTS, pos_weight=WEIGHTS, reduction=r), BINARY),
    "cosine_embedding_loss": (
        lambda o, t, r: F.cosine_embedding_loss(o, t, t[:, 0].sign(), reduction=r), OTHER),
    "cross_entropy": (
        lambda o, t, r: F.cross_entropy(o, t, WEIGHTS, ignore_index=3, reduction=r), CLASSES),
    "ctc_loss": (_ctc, CLASSES),
    "gaussian_nll_loss": (
        lambda o, t, r: F.gaussian_nll_loss(o, t, o.exp(), reduction=r), OTHER),
    "hinge_embedding_loss": (
        lambda o, t, r: F.hinge_embedding_loss(o, t, reduction=r), SIGNS),
    "huber_loss": (lambda o, t, r: F.huber_loss(o, t, reduction=r), OTHER),
    "kl_div": (lambda o, t, r: F.kl_div(o.log_softmax(-1), t.softmax(-1), reduction=r), OTHER),
    "l1_loss": (lambda o, t, r: F.l1_loss(o, t, reduction=r), OTHER),
    "linear_cross_entropy": (
        lambda o, t, r: F.linear_cross_entropy(o, _HEAD, t, reduction=r), CLASSES),
    "margin_ranking_loss": (
        lambda o, t, r: F.margin_ranking_loss(o, 2 * o.tanh(), t, reduction=r), SIGNS),
    "mse_loss": (lambda o, t, r: F.mse_loss(o, t, reduction=r), OTHER),
    "multi_margin_loss": (lambda o, t, r: F.multi_margin_loss(o, t, reduction=r), CLASSES),
    "multilabel_margin_loss": (
        lambda o, t, r: F.multilabel_margin_loss(o, t, reduction=r), MULTI_LABEL),
    "multilabel_soft_margin_loss": (
        lambda o, t, r: F.multilabel_soft_margin_loss(o, t, reduction=r), BINARY),
    "nll_loss": (
        lambda o, t, r: F.nll_loss(o.log_softmax(-1), t, WEIGHTS, ignore_index=2, reduction=r),
        CLASSES),
    "poisson_nll_loss": (
        lambda o, t, r: F.poisson_nll_loss(o, t, full=True, reduction=r), BINARY),
    "smooth_l1_loss": (lambda o, t, r: F.smooth_l1_loss(o, t, reduction=r), OTHER),
    "soft_margin_loss": (lambda o, t, r: F.soft_margin_loss(o, t, reduction=r), SIGNS),
    "triplet_margin_loss": (
        lambda o, t, r: F.triplet_margin_loss(o, t, 1 - t, reduction=r), OTHER),
    "triplet_margin_with_distance_loss": (
        lambda o, t, r: F.triplet_margin_with_distance_loss(o, t, 1 - t, reduction=r), OTHER),
}  # fmt: skip
_HEAD = torch.randn(FEATURES, FEATURES, generator=_GENERATOR).double()


def losses() -> list[str]:
    """Names of the losses of the installed version: functions with the parameter reduction."""
    public = ((name, getattr(F, name)) for name in dir(F) if not name.startswith("_"))
    return [name for name, value in public if "reduction" in _parameters(value)]


def _parameters(value: Any) -> Any:
    try:
        return inspect.signature(value).parameters
    except (TypeError, ValueError):  # a module, or a function of C++
        return {}


def step(loss: Loss, targets: Any) -> Job:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
    return Job(module.double(), (REAL,), targets, loss)


def summed(loss: Loss, reduction: str) -> Loss:
    """The loss as a scalar."""

    def scalar(output: Any, targets: Any) -> Any:
        value = loss(output, targets, reduction)
        return (value * value).sum() if reduction == "none" else value

    return scalar


@contextmanager
def own_rules() -> Iterator[None]:
    """Undo the registrations of operators, so that one case does not hide another's fault."""
    rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    before = dict(rules)
    try:
        yield
    finally:
        rules.clear()
        rules.update(before)


def check_on_two_ranks(job: Job, text: str = "") -> None:
    """Run ``check`` of a text, or of that of a data-parallel plan, on two ranks."""
    pasted: dict[str, Any] = {}
    exec(text or EXPORTED, pasted)
    pasted["REPLICATED"] = replicated_operators(job)

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        pasted["check"](job.module, job.inputs, job.targets, job.loss, mesh)

    with own_rules():
        run_on_threads(2, on_rank)


EXPORTED = export_job(step(F.mse_loss, OTHER), "data-parallel", (2,)).text


def test_every_loss_of_the_installed_version_has_inputs_here() -> None:
    assert set(losses()) <= set(LOSSES)
    assert len(losses()) >= 20


@pytest.mark.parametrize(
    "reduction",
    ["mean", *(pytest.param(other, marks=pytest.mark.slow) for other in ("sum", "none"))],
)
@pytest.mark.parametrize("name", losses())
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_losses_have_the_gradients_of_one_process(name: str, reduction: str) -> None:
    loss, targets = LOSSES[name]
    try:
        check_on_two_ranks(step(summed(loss, reduction), targets))
    except BadModel:  # refused by name, before anything is exported
        assert name in ("ctc_loss", "gaussian_nll_loss")  # these branch on values
    except (RuntimeError, ValueError) as error:
        assert not isinstance(error, ValueError) or "does not run" in str(error)
        assert VERSION == "2.11" and name in LOSSES_WITH_ERROR


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda y: y.mean(),
    "mean of a dimension": lambda y: y.mean(0),
    "variance": lambda y: y.var(0),
    "variance of all": lambda y: y.var(),
    "standard deviation": lambda y: y.std(-1),
    "norm": lambda y: y.norm(),
    "norm of rows": lambda y: torch.linalg.vector_norm(y, dim=-1),
    "norm of order 3": lambda y: torch.linalg.vector_norm(y, 3),
    "largest": lambda y: y.amax(0),
    "largest with indices": lambda y: y.max(0).values,
    "smallest": lambda y: y.min(-1).values,
    "median": lambda y: y.median(0).values,
    "product": lambda y: y.prod(0),
    "logarithm of a sum": lambda y: y.logsumexp(0),
    "softmax": lambda y: y.softmax(0),
    "softmax of rows": lambda y: y.log_softmax(-1),
    "top values": lambda y: y.topk(2, 0).values,
    "sorted": lambda y: y.sort(0).values,
    "running sum": lambda y: y.cumsum(0),
    "running product": lambda y: y.cumprod(-1),
    "gather": lambda y: y.gather(1, CLASSES[:, None]),
    "scatter": lambda y: torch.zeros_like(y).scatter(1, CLASSES[:, None], y[:, :1]),
    "added at indices": lambda y: torch.zeros_like(y).index_add(0, CLASSES, y),
    "rows by index": lambda y: y[CLASSES],
    "selected rows": lambda y: y.index_select(0, CLASSES),
    "masked": lambda y: y.masked_fill(BINARY.bool(), 2.0),
    "chosen": lambda y: torch.where(BINARY.bool(), y, y * y),
    "rolled": lambda y: y.roll(1, 0),
    "flipped": lambda y: y.flip(0),
    "triangle": lambda y: y.tril(),
    "padded": lambda y: F.pad(y, (1, 1)),
    "concatenated": lambda y: torch.cat([y, y.tanh()], 0),
    "stacked": lambda y: torch.stack([y, y.tanh()], 1),
    "divided": lambda y: y[1:] - y[:-1],
    "squares of all pairs": lambda y: y @ y.T,
    "distances": lambda y: torch.cdist(y, y.tanh() + 1),
    "layer norm": lambda y: F.layer_norm(y, (FEATURES,), WEIGHTS),
    "group norm": lambda y: F.group_norm(y, 2, WEIGHTS),
    "root mean square norm": lambda y: F.rms_norm(y, (FEATURES,), WEIGHTS),
    "batch norm": lambda y: F.batch_norm(y, None, None, training=True),
    "cosine": lambda y: F.cosine_similarity(y, OTHER),
    "normalised": lambda y: F.normalize(y, dim=0),
    "parametric relu": lambda y: F.prelu(y, WEIGHTS),
    "gated": lambda y: F.glu(y),
    "pooled": lambda y: F.avg_pool1d(y[None], 2),
    "largest of windows": lambda y: F.max_pool1d(y[None], 2),
    "interpolated": lambda y: F.interpolate(y[None], scale_factor=2.0),
    "convolved": lambda y: F.conv1d(y[:, None], _HEAD[:2, None, :3]),
    "attention": lambda y: F.scaled_dot_product_attention(
        y.view(1, 2, 4, FEATURES), y.view(1, 2, 4, FEATURES).tanh(), y.view(1, 2, 4, FEATURES)),
    "product of three": lambda y: torch.einsum("bi,ij,bj->b", y, _HEAD, y),
    "unfolded": lambda y: y.unfold(0, 4, 2),
    "logarithm of a determinant": lambda y: torch.logdet(y.T @ y + torch.eye(FEATURES).double()),
}  # fmt: skip
ACTIVATIONS = {
    "samples": ("Replicate()", "Replicate()"),
    "features": ("Shard(0)", "Shard(0)"),
    "sums": ("Shard(1)", "Replicate()"),
}
"""How a layer's result is sharded, by the placements of its weight and bias."""
WITH_ERROR = {
    (name, "features")
    for name in ("running product", "gather", "root mean square norm", "convolved")
}
"""Cases that DTensor refuses with an error of its own."""
VERSION = ".".join(torch.__version__.split(".")[:2])
WITH_ERROR |= {
    (name, "samples")
    for name in {
        "2.11": ("selected rows", "group norm", "batch norm", "cosine", "convolved"),
        "2.12": ("running product",),
    }.get(VERSION, ())
}
LOSSES_WITH_ERROR = ("cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss")
"""The same for losses, with torch 2.11: it has no rule for ``clamp_min_``."""


@pytest.mark.parametrize(
    "activations",
    ["samples", *(pytest.param(other, marks=pytest.mark.slow) for other in ("features", "sums"))],
)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_the_gradients_of_one_process(name: str, activations: str) -> None:
    def loss(output: Any, targets: Any) -> Any:
        value = OPERATORS[name](output)
        weights = torch.arange(value.numel(), dtype=torch.float64).cos().view(value.shape)
        return (value * weights if value.numel() > 1 else value).sum()

    job = step(loss, OTHER)
    weight, bias = ACTIVATIONS[activations]
    last = f"    '2': Placed({{'weight': [{weight}], 'bias': [{bias}]}}),"
    text, changes = re.subn(r"^    '2': .*$", last, EXPORTED, flags=re.MULTILINE)
    assert changes == 1
    try:
        check_on_two_ranks(job, text)
    except (RuntimeError, IndexError, ValueError) as error:
        assert not isinstance(error, ValueError) or "does not run" in str(error)
        assert (name, activations) in WITH_ERROR


@pytest.mark.parametrize(("layer", "name"), [(0, "the loss"), (None, "the gradient of 0.weight")])
def test_the_check_names_the_first_value_that_differs(layer: int | None, name: str) -> None:
    job = step(F.mse_loss, OTHER)

    def doubled(module: nn.Module, inputs: Any, result: Any) -> Any:
        return 2 * result if isinstance(result, DTensor) else result

    def doubled_gradient(module: nn.Module, inputs: Any, result: Any) -> None:
        if isinstance(result, DTensor):
            result.register_hook(lambda gradient: 2 * gradient)

    if layer is None:
        job.module[1].register_forward_hook(doubled_gradient)
    else:
        job.module[layer].register_forward_hook(doubled)
    with pytest.raises(ValueError, match=f"{name} on this mesh differs from one process by"):
        check_on_two_ranks(job)


def test_the_check_refuses_random_steps() -> None:
    job = step(F.mse_loss, OTHER)
    job.module.append(nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"two steps of one process differ: .* call eval"):
        check_on_two_ranks(job)
