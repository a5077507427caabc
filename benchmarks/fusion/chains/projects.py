"""Kinds of chains that public projects have, written anew from their published definitions.

No other file of this repository uses these projects.  The kinds, not the chains, are split once and
for all: on one half rules may be developed (``train``), on the other they are only judged
(``test``).  Products around the chains are left out.  Inputs are random numbers between -2 and 2
(:mod:`.programs`), so widths, densities and probabilities are made of them first.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.fusion.chains.generated import BF16, FP32, INDEX, Split
from benchmarks.fusion.chains.programs import Chain, InputSpec

EDGES, BINS, NODES = 1 << 20, 16, 1000
Dims = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of chain: whose it is, what it computes, and on which inputs."""

    project: str
    function: Callable[..., object]
    inputs: Callable[..., Sequence[InputSpec]]
    """The inputs for some sizes."""
    sizes: tuple[Dims, Dims]
    """The sizes of its two chains."""
    trained: bool = False
    """Whether floating-point inputs have gradients: the step is then forward and backward."""
    constants: tuple[int, ...] = ()
    """Inputs without gradients all the same, such as targets."""


def bf16(*shape: int) -> InputSpec:
    return shape, BF16


def fp32(*shape: int) -> InputSpec:
    return shape, FP32


def index(*shape: int) -> InputSpec:
    return shape, INDEX


def rescaled_guidance(cond: Tensor, uncond: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
    """Classifier-free guidance, its deviation rescaled, then an Euler step."""
    guided = uncond + 7.5 * (cond - uncond)
    dims = list(range(1, x.dim()))
    scale = cond.std(dims, keepdim=True) / guided.std(dims, keepdim=True)
    denoised = 0.7 * guided * scale + 0.3 * guided
    noise = (x - denoised) / (sigma.abs()[:, None, None, None] + 0.1)
    return x - 0.1 * noise


def gated_pairs(z: Tensor, weight: Tensor, bias: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
    """Layer norm of pairs, gated and masked, as in front of a triangle's product."""
    normed = F.layer_norm(z, z.shape[-1:], weight, bias)
    return normed * torch.sigmoid(gate) * mask[..., None]


def volume_rendering(density: Tensor, colour: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of samples along rays by their transmittance, then colour and depth."""
    depth = F.softplus(density) * delta.abs()
    before = torch.cumsum(depth, -1) - depth
    weights = (1 - torch.exp(-depth)) * torch.exp(-before)
    rgb = (weights[..., None] * torch.sigmoid(colour)).sum(-2)
    return rgb, weights.sum(-1)


def spherical_harmonics(coefficients: Tensor, direction: Tensor) -> Tensor:
    """Colours of splats: harmonics up to degree 2 of unit directions (points x 9 x 3)."""
    x, y, z = F.normalize(direction, dim=-1).unbind(-1)
    basis = torch.stack(
        (
            torch.full_like(x, 0.2820948), -0.4886025 * y, 0.4886025 * z, -0.4886025 * x,
            1.0925484 * x * y, -1.0925484 * y * z, 0.3153916 * (2 * z * z - x * x - y * y),
            -1.0925484 * x * z, 0.5462742 * (x * x - y * y),
        ),
        -1,
    )  # fmt: skip
    return torch.relu((basis[..., None] * coefficients).sum(-2) + 0.5)


def snake(x: Tensor, alpha: Tensor) -> Tensor:
    """Periodic activation with a frequency for each channel."""
    scale = alpha.abs()[:, None] + 0.1
    return x + torch.sin(scale * x).square() / scale


def ppo_loss(
    logits: Tensor, action: Tensor, old: Tensor, advantage: Tensor, value: Tensor, target: Tensor
) -> Tensor:
    """Clipped surrogate, clipped value loss and entropy of discrete actions."""
    log_p = torch.log_softmax(logits.float(), -1)
    taken = log_p.gather(-1, action[:, None])[:, 0]
    ratio = torch.exp(taken - old.detach())
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    return policy - 0.01 * entropy + 0.5 * (value - target).square().mean()


def squashed_gaussian(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A sample of a Gaussian through tanh, and its log-probability."""
    log_std = torch.tanh(log_std) * 3.5 - 1.5
    raw = mean + log_std.exp() * noise
    log_p = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    squash = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
    return torch.tanh(raw), (log_p - squash).sum(-1)


def two_hot_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy with a symlog target between two bins."""
    bins = torch.linspace(-20, 20, logits.shape[-1], device=logits.device)
    wanted = torch.sign(target) * torch.log1p(target.abs() * 100)
    distance = (wanted[:, None] - bins).abs() / (bins[1] - bins[0])
    weight = (1 - distance).clamp_min(0)
    return -(weight * torch.log_softmax(logits.float(), -1)).sum(-1).mean()


def instance_norm_series(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reversible normalisation of series over time (batch x time x variables)."""
    mean = x.mean(1, keepdim=True)
    deviation = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
    return (x - mean) / deviation * weight + bias, mean, deviation


def dice_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Soft dice over space with a softmax over channels."""
    probability = torch.softmax(logits, 1)
    truth = torch.sigmoid(target)
    dims = list(range(2, logits.dim()))
    both = (probability * truth).sum(dims)
    sizes = probability.sum(dims) + truth.sum(dims)
    return (1 - (2 * both + 1e-5) / (sizes + 1e-5)).mean()


def rgb_to_lab(image: Tensor) -> Tensor:
    """sRGB to CIE Lab: gamma, three sums of channels, cube roots."""
    image = torch.sigmoid(image)
    linear = torch.where(image > 0.04045, ((image + 0.055) / 1.055) ** 2.4, image / 12.92)
    r, g, b = linear.unbind(1)
    x = (0.412453 * r + 0.357580 * g + 0.180423 * b) / 0.950456
    y = 0.212671 * r + 0.715160 * g + 0.072169 * b
    z = (0.019334 * r + 0.119193 * g + 0.950227 * b) / 1.088754
    xyz = torch.stack((x, y, z), 1)
    f = torch.where(xyz > 0.008856, xyz.clamp_min(1e-6) ** (1 / 3), 7.787 * xyz + 4 / 29)
    fx, fy, fz = f.unbind(1)
    return torch.stack((116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)), 1)


def response_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Global response normalisation, channels last (batch x height x width x channels)."""
    size = x.norm(p=2, dim=(1, 2), keepdim=True)
    return x + weight * (x * (size / (size.mean(-1, keepdim=True) + 1e-6))) + bias


def angular_margin(cosine: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of scaled cosines with a margin added to the label's angle."""
    cosine = torch.tanh(cosine.float())
    sine = torch.sqrt((1 - cosine.square()).clamp_min(1e-6))
    moved = cosine * math.cos(0.5) - sine * math.sin(0.5)
    hit = torch.arange(cosine.shape[-1], device=cosine.device) == label[:, None]
    return F.cross_entropy(64 * torch.where(hit, moved, cosine), label)


def variance_loss(a: Tensor, b: Tensor) -> Tensor:
    """Invariance and a hinge on the deviation of each feature over the batch."""
    terms = [F.relu(1 - torch.sqrt(x.float().var(0) + 1e-4)).mean() for x in (a, b)]
    return 25 * F.mse_loss(a.float(), b.float()) + 25 * (terms[0] + terms[1]) / 2


def distillation(student: Tensor, teacher: Tensor, centre: Tensor) -> Tensor:
    """Cross-entropy of a student with a centred, sharpened teacher."""
    wanted = torch.softmax((teacher.detach().float() - centre.detach()) / 0.07, -1)
    return -(wanted * torch.log_softmax(student.float() / 0.1, -1)).sum(-1).mean()


def factorisation(fields: Tensor, linear: Tensor) -> Tensor:
    """Second-order interactions of fields (batch x fields x width) and a first-order term."""
    pairs = fields.sum(1).square() - fields.square().sum(1)
    return torch.sigmoid(0.5 * pairs.sum(-1) + linear.sum(-1))


def box_loss(box: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Generalised IoU of boxes given by two corners (boxes x 4)."""

    def corners(x: Tensor) -> tuple[Tensor, Tensor]:
        low, size = x[:, :2], F.softplus(x[:, 2:])
        return low, low + size

    (low, high), (low_t, high_t) = corners(box), corners(target)
    common = (torch.min(high, high_t) - torch.max(low, low_t)).clamp_min(0).prod(-1)
    union = (high - low).prod(-1) + (high_t - low_t).prod(-1) - common + 1e-6
    hull = (torch.max(high, high_t) - torch.min(low, low_t)).prod(-1) + 1e-6
    giou = common / union - (hull - union) / hull
    return ((1 - giou) * weight.abs()).sum() / weight.abs().sum()


def expected_distance(x: Tensor, anchor: Tensor) -> Tensor:
    """Box sides as expectations over bins (batch x 4 bins x anchors), then corners."""
    batch, _, anchors = x.shape
    share = x.view(batch, 4, BINS, anchors).softmax(2)
    bins = torch.arange(BINS, device=x.device, dtype=x.dtype)[:, None]
    side = (share * bins).sum(2)
    return torch.cat((anchor - side[:, :2], anchor + side[:, 2:]), 1)


def radial_filter(distance: Tensor, weight: Tensor) -> Tensor:
    """Gaussians of distances with a cosine cutoff, weighted (edges x basis)."""
    distance = distance.abs()[:, None] * 2
    centres = torch.linspace(0, 5, weight.shape[-1], device=distance.device)
    cutoff = 0.5 * (torch.cos(distance * math.pi / 5) + 1) * (distance < 5)
    return torch.exp(-10 * (distance - centres).square()) * cutoff * weight


def norm_activation(x: Tensor, bias: Tensor) -> Tensor:
    """Vectors scaled by an activation of their norm (nodes x channels x 3)."""
    norm = torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-8)
    return x / norm * F.silu(norm + bias[:, None])


def rotations(quaternion: Tensor) -> Tensor:
    """Rotation matrices of quaternions (rows of 4)."""
    r, i, j, k = quaternion.unbind(-1)
    s = 2.0 / (quaternion * quaternion).sum(-1).clamp_min(1e-6)
    rows = (
        1 - s * (j * j + k * k), s * (i * j - k * r), s * (i * k + j * r),
        s * (i * j + k * r), 1 - s * (i * i + k * k), s * (j * k - i * r),
        s * (i * k - j * r), s * (j * k + i * r), 1 - s * (i * i + j * j),
    )  # fmt: skip
    return torch.stack(rows, -1)


def quantised_activation(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm, then 8 bits with a scale for each token; gradients pass through the rounding."""
    normed = F.rms_norm(x, x.shape[-1:], weight)
    scale = 127 / normed.abs().amax(-1, keepdim=True).clamp_min(1e-5)
    rounded = (normed * scale).round().clamp(-128, 127) / scale
    return normed + (rounded - normed).detach()


def unpacked_weights(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Weights of 4 bits, eight in an int32, with a scale and a zero for each group of 128 rows."""
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    values = (packed[..., None] >> shifts) & 15
    values = values.flatten(-2).unflatten(0, (-1, 128))
    return ((values - zero[:, None]) * scale[:, None]).to(BF16).flatten(0, 1)


def adan_step(
    w: Tensor, g: Tensor, before: Tensor, m: Tensor, d: Tensor, n: Tensor
) -> tuple[Tensor, ...]:
    """An optimiser step with momentum of gradients and of their differences."""
    difference = g - before
    m, d = m.lerp(g, 0.02), d.lerp(difference, 0.08)
    n = n.abs().lerp((g + 0.92 * difference).square(), 0.01)
    update = (m + 0.92 * d) / (n.sqrt() + 1e-8)
    return (w - 1e-3 * update) / (1 + 1e-5), m, d, n


def spline_bases(x: Tensor) -> Tensor:
    """Cubic B-spline bases on a uniform grid of five intervals (rows x features x bases)."""
    grid = torch.arange(-3, 9, device=x.device, dtype=x.dtype) * 0.4 - 1
    x = x[..., None]
    bases = ((x >= grid[:-1]) & (x < grid[1:])).to(x.dtype)
    for k in range(1, 4):
        left = (x - grid[: -k - 1]) / (grid[k:-1] - grid[: -k - 1]) * bases[..., :-1]
        right = (grid[k + 1 :] - x) / (grid[k + 1 :] - grid[1:-k]) * bases[..., 1:]
        bases = left + right
    return bases


def matern(product: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Matern 5/2 covariances from products and squared norms, and the sum of each row."""
    square = (a.abs()[:, None] + b.abs() + 4 - product).clamp_min(1e-6)
    distance = math.sqrt(5) * square.sqrt()
    covariance = (1 + distance + 5 / 3 * square) * torch.exp(-distance)
    return covariance, covariance.sum(-1)


def head_norm_gate(x: Tensor, weight: Tensor, bias: Tensor, bonus: Tensor, gate: Tensor) -> Tensor:
    """Norm of each head of a recurrent mixer, a bonus, and a gate (tokens x width, heads of 64)."""
    normed = F.group_norm(x, x.shape[-1] // 64, weight, bias, 64e-5)
    return (normed + bonus) * F.silu(gate)


def exponential_gates(
    i: Tensor, f: Tensor, z: Tensor, o: Tensor, c: Tensor, n: Tensor, m: Tensor
) -> tuple[Tensor, ...]:
    """A step of a memory cell with exponential gates and a stabiliser."""
    log_f = F.logsigmoid(f) + m
    stable = torch.maximum(log_f, i)
    keep, write = torch.exp(log_f - stable), torch.exp(i - stable)
    c, n = keep * c + write * torch.tanh(z), keep * n.abs() + write
    return torch.sigmoid(o) * c / n.clamp_min(1e-6), c, n, stable


def norm_glu_scale(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, skip: Tensor) -> Tensor:
    """Norm over channels and time, GLU over channels, a scale for each channel, a residual."""
    normed = F.group_norm(x, 1, w, b)
    return skip + scale[:, None] * F.glu(normed, 1)


def demodulation(weight: Tensor, style: Tensor) -> Tensor:
    """Convolution weights of each sample, scaled to unit norm (samples x out x in x taps)."""
    w = weight[None] * (style + 1)[:, None, :, None]
    return w * torch.rsqrt(w.square().sum((2, 3), keepdim=True) + 1e-8)


def transport_step(cost: Tensor, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both potentials of entropic transport after a half step each, over rows and columns."""
    rows = -0.1 * torch.logsumexp((g[:, None, :] - cost) / 0.1, 2)
    columns = -0.1 * torch.logsumexp((f[:, :, None] - cost) / 0.1, 1)
    return 0.5 * (f + rows), 0.5 * (g + columns)


def gumbel_codes(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A Gumbel softmax, and the perplexity of the mean use of codes."""
    uniform = torch.sigmoid(noise.detach().float())
    gumbel = -torch.log(-torch.log(uniform))
    soft = torch.softmax((logits.float() + gumbel) / 2, -1)
    mean = torch.softmax(logits.float(), -1).mean(0)
    return soft.to(logits.dtype), torch.exp(-(mean * torch.log(mean + 1e-7)).sum())


def edge_softmax(score: Tensor, target: Tensor) -> Tensor:
    """Leaky scores of edges, normalised over the edges of each node (edges x heads)."""
    score = F.leaky_relu(score, 0.2)
    where = target[:, None].expand_as(score)
    most = score.new_full((NODES, score.shape[-1]), -1e9)
    most = most.scatter_reduce(0, where, score, "amax")
    weight = torch.exp(score - most[target])
    total = weight.new_zeros(NODES, score.shape[-1]).index_add(0, target, weight)
    return weight / (total[target] + 1e-16)


def feature_norm(power: Tensor, length: Tensor) -> Tensor:
    """Log energies, normalised over the valid frames of each utterance (batch x time x bands)."""
    log = torch.log(power.abs().clamp_min(1e-5))
    valid = (torch.arange(log.shape[1], device=log.device) < length[:, None] + 500)[..., None]
    count = valid.sum(1, keepdim=True).clamp_min(1)
    mean = (log * valid).sum(1, keepdim=True) / count
    square = ((log - mean).square() * valid).sum(1, keepdim=True) / count
    return (log - mean) / (square + 1e-5).sqrt() * valid


def relative_shift(content: Tensor, position: Tensor) -> Tensor:
    """Scores of content and of shifted positions, then a softmax (batch x heads x n x n)."""
    b, h, n, m = position.shape
    padded = F.pad(position, (1, 0)).view(b, h, m + 1, n)[:, :, 1:]
    return torch.softmax((content + padded.view(b, h, n, m)).float() / 8, -1).to(content.dtype)


def separation_loss(estimate: Tensor, source: Tensor) -> Tensor:
    """Negative scale-invariant ratio of signal and distortion (signals x samples)."""
    estimate = estimate - estimate.mean(-1, keepdim=True)
    source = source - source.mean(-1, keepdim=True)
    energy = source.square().sum(-1, keepdim=True) + 1e-8
    signal = (estimate * source).sum(-1, keepdim=True) / energy * source
    ratio = signal.square().sum(-1) / ((estimate - signal).square().sum(-1) + 1e-8)
    return -10 * torch.log10(ratio + 1e-8).mean()


def solver_error(
    y: Tensor, k1: Tensor, k2: Tensor, k3: Tensor, k4: Tensor
) -> tuple[Tensor, Tensor]:
    """A Runge-Kutta step, and its error relative to a tolerance for each row."""
    new = y + 0.1 * (k1 / 6 + k2 / 3 + k3 / 3 + k4 / 6)
    error = 0.1 * (k1 * 0.02 - k2 * 0.05 + k3 * 0.04 - k4 * 0.01)
    tolerance = 1e-4 + 1e-3 * torch.maximum(y.abs(), new.abs())
    return new, (error / tolerance).square().mean(-1).sqrt()


PROJECTS: dict[str, Kind] = {
    "guidance with rescaled deviation": Kind(
        "k-diffusion", rescaled_guidance,
        lambda n, c, s: (*[bf16(n, c, s, s)] * 3, fp32(n)), ((16, 16, 256), (64, 4, 128)),
    ),
    "gated norm of pairs": Kind(
        "openfold", gated_pairs,
        lambda n, c: (bf16(n, n, c), bf16(c), bf16(c), bf16(n, n, c), bf16(n, n)),
        ((512, 128), (768, 64)), True, (4,),
    ),
    "volume rendering": Kind(
        "nerfstudio", volume_rendering, lambda r, s: (fp32(r, s), fp32(r, s, 3), fp32(r, s)),
        ((65536, 64), (16384, 192)), True, (2,),
    ),
    "spherical harmonics": Kind(
        "gsplat", spherical_harmonics, lambda n: (fp32(n, 9, 3), fp32(n, 3)),
        ((1 << 21,), (500_000,)),
    ),
    "periodic activation": Kind(
        "descript-audio-codec", snake, lambda n, c, t: (bf16(n, c, t), bf16(c)),
        ((16, 256, 16384), (32, 768, 2048)), True,
    ),
    "clipped policy loss": Kind(
        "cleanrl", ppo_loss, lambda n, a: (fp32(n, a), index(n), *[fp32(n)] * 4),
        ((16384, 1024), (65536, 1000)), True, (2, 3, 5),
    ),
    "squashed Gaussian": Kind(
        "torchrl", squashed_gaussian, lambda n, a: (*[fp32(n, a)] * 3,),
        ((1 << 20, 16), (1 << 18, 60)), True, (2,),
    ),
    "two-hot loss": Kind(
        "dreamerv3", two_hot_loss, lambda n, c: (bf16(n, c), fp32(n)),
        ((131072, 255), (16384, 1023)), True, (1,),
    ),
    "reversible norm of series": Kind(
        "Time-Series-Library", instance_norm_series,
        lambda n, t, c: (fp32(n, t, c), fp32(c), fp32(c)), ((128, 512, 321), (64, 336, 862)), True,
    ),
    "soft dice": Kind(
        "MONAI", dice_loss, lambda n, c, s: (*[bf16(n, c, s, s, s)] * 2,),
        ((2, 4, 160), (4, 14, 96)), True, (1,),
    ),
    "colour space": Kind(
        "kornia", rgb_to_lab, lambda n, s: (fp32(n, 3, s, s),), ((32, 512), (64, 384))
    ),
    "global response norm": Kind(
        "ConvNeXt-V2", response_norm, lambda n, s, c: (bf16(n, s, s, c), bf16(c), bf16(c)),
        ((64, 28, 768), (64, 14, 1536)), True,
    ),
    "angular margin": Kind(
        "pytorch-metric-learning", angular_margin, lambda n, c: (bf16(n, c), index(n)),
        ((2048, 32768), (1024, 85742)), True,
    ),
    "variance of features": Kind(
        "solo-learn", variance_loss, lambda n, c: (*[bf16(n, c)] * 2,),
        ((2048, 8192), (4096, 3000)), True,
    ),
    "centred distillation": Kind(
        "dinov2", distillation, lambda n, c: (*[bf16(n, c)] * 2, fp32(c)),
        ((1024, 65536), (512, 131072)), True, (1, 2),
    ),
    "factorisation machine": Kind(
        "RecBole", factorisation, lambda n, f, w: (fp32(n, f, w), fp32(n, f)),
        ((32768, 39, 16), (16384, 26, 64)), True,
    ),
    "generalised overlap": Kind(
        "mmdetection", box_loss, lambda n: (fp32(n, 4), fp32(n, 4), fp32(n)),
        ((1 << 21,), (400_000,)), True, (1, 2),
    ),
    "expected distances": Kind(
        "ultralytics", expected_distance, lambda n, a: (bf16(n, 4 * BINS, a), bf16(n, 2, a)),
        ((64, 8400), (32, 33600)),
    ),
    "radial filter": Kind(
        "schnetpack", radial_filter, lambda e, b: (fp32(e), fp32(e, b)),
        ((EDGES, 50), (EDGES // 4, 128)), True,
    ),
    "activation of norms": Kind(
        "e3nn", norm_activation, lambda n, c: (fp32(n, c, 3), fp32(c)),
        ((65536, 128), (20000, 256)), True,
    ),
    "rotations": Kind("pytorch3d", rotations, lambda n: (fp32(n, 4),), ((1 << 22,), (1_000_000,))),
    "quantised activation": Kind(
        "BitNet", quantised_activation, lambda n, c: (bf16(n, c), bf16(c)),
        ((16384, 4096), (8192, 5504)), True,
    ),
    "unpacked weights": Kind(
        "AutoAWQ", unpacked_weights,
        lambda k, n: (((k, n // 8), torch.int32), fp32(k // 128, n), fp32(k // 128, n)),
        ((8192, 28672), (4096, 11008)),
    ),
    "step with differences": Kind(
        "pytorch-optimizer", adan_step, lambda n: (*[fp32(n)] * 6,), ((1 << 24,), (3_000_000,))
    ),
    "spline bases": Kind(
        "efficient-kan", spline_bases, lambda n, c: (fp32(n, c),), ((8192, 784), (65536, 64))
    ),
    "covariances": Kind(
        "GPyTorch", matern, lambda n, m: (fp32(n, m), fp32(n), fp32(m)),
        ((8192, 8192), (3000, 10000)), True,
    ),
    "norm of heads with a gate": Kind(
        "RWKV-LM", head_norm_gate, lambda n, c: (bf16(n, c), *[bf16(c)] * 2, *[bf16(n, c)] * 2),
        ((16384, 2048), (8192, 2560)), True,
    ),
    "exponential gates": Kind(
        "xlstm", exponential_gates, lambda n, c: (*[fp32(n, c)] * 7,), ((8192, 1024), (2048, 3000))
    ),
    "norm, GLU and a scale": Kind(
        "demucs", norm_glu_scale,
        lambda n, c, t: (bf16(n, 2 * c, t), *[bf16(2 * c)] * 2, bf16(c), bf16(n, c, t)),
        ((8, 384, 8192), (16, 192, 5000)), True,
    ),
    "demodulated weights": Kind(
        "stylegan3", demodulation, lambda n, c: (fp32(c, c, 9), fp32(n, c)),
        ((16, 512), (32, 256)), True,
    ),
    "transport step": Kind(
        "geomloss", transport_step, lambda n, p: (fp32(n, p, p), fp32(n, p), fp32(n, p)),
        ((16, 2048), (64, 700)),
    ),
    "Gumbel codes": Kind(
        "fairseq", gumbel_codes, lambda n, c: (*[bf16(n, c)] * 2,), ((65536, 320), (16384, 1024)),
        True, (1,),
    ),
    "softmax over edges": Kind(
        "torch_geometric", edge_softmax, lambda e, h: (fp32(e, h), index(e)),
        ((EDGES, 8), (EDGES // 2, 4)),
    ),
    "norm of features": Kind(
        "speechbrain", feature_norm, lambda n, t, c: (fp32(n, t, c), index(n)),
        ((64, 3000, 80), (32, 1500, 128)),
    ),
    "shifted positions": Kind(
        "espnet", relative_shift, lambda n, h, t: (*[bf16(n, h, t, t)] * 2,),
        ((16, 8, 512), (8, 4, 1000)),
    ),
    "ratio of signals": Kind(
        "asteroid", separation_loss, lambda n, t: (*[fp32(n, t)] * 2,),
        ((512, 64000), (2048, 8000)), True, (1,),
    ),
    "error of a solver": Kind(
        "torchdiffeq", solver_error, lambda n, c: (*[fp32(n, c)] * 5,),
        ((16384, 1024), (65536, 100)),
    ),
}  # fmt: skip
"""All kinds by name."""


def project_chains() -> dict[str, tuple[Kind, Chain]]:
    """The chains of all kinds by name: first those of the first sizes."""
    return {
        f"{name} {'x'.join(map(str, sizes))}": (
            kind,
            Chain(name, kind.function, tuple(kind.inputs(*sizes))),  # type: ignore[arg-type]
        )
        for turn in (0, 1)
        for name, kind in PROJECTS.items()
        for sizes in (kind.sizes[turn],)
    }


def kinds_of(split: Split) -> list[str]:
    """The kinds of a half: ``test`` has the half with the greater SHA-256 of the name."""
    ranked = sorted(PROJECTS, key=lambda name: hashlib.sha256(name.encode()).digest())
    half = set(ranked[(len(ranked) + 1) // 2 :])
    return [name for name in PROJECTS if (name in half) == (split == "test")]
