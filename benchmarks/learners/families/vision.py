"""Models of images of random size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from benchmarks.learners.families.sizes import Builder, Step, multiple, one_of


def _images(rng: np.random.Generator, sides: tuple[int, ...]) -> torch.Tensor:
    side = one_of(rng, *sides)
    return torch.empty(multiple(rng, 2, 64), 3, side, side)


def _classify(network: nn.Module, images: torch.Tensor, classes: int) -> Step:
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    del classes
    return lambda: functional.cross_entropy(network(images), labels)


def _plain(rng: np.random.Generator) -> Step:
    images, classes = _images(rng, (32, 64, 128, 224)), multiple(rng, 10, 1000)
    width, layers = multiple(rng, 16, 96, 8), []
    has_norm = bool(rng.integers(2))
    channels = 3
    for _ in range(multiple(rng, 2, 5)):
        for _ in range(multiple(rng, 1, 3)):
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            layers += [nn.BatchNorm2d(width)] if has_norm else []
            layers.append(nn.ReLU())
            channels = width
        layers.append(nn.MaxPool2d(2))
        width = min(2 * width, 512)
    hidden = multiple(rng, 128, 4096)
    head = [nn.AdaptiveAvgPool2d(one_of(rng, 1, 2, 7)), nn.Flatten()]
    inner = nn.Sequential(*layers, *head)
    size = inner(images).shape[1]
    classifier = [nn.Linear(size, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, classes)]
    return _classify(nn.Sequential(inner, *classifier), images, classes)


def _resnet(model: str) -> Builder:
    def build(rng: np.random.Generator) -> Step:
        width = multiple(rng, 16, 64, 8)
        config = getattr(hf, f"{model}Config")(
            embedding_size=width,
            hidden_sizes=[width * one_of(rng, 1, 4) * 2**i for i in range(4)],
            depths=[multiple(rng, 1, 4) for _ in range(4)],
            layer_type=one_of(rng, "basic", "bottleneck") if model == "ResNet" else "y",
            num_labels=multiple(rng, 10, 1000),
            **({"groups_width": 8} if model == "RegNet" else {}),
        )
        network = getattr(hf, f"{model}ForImageClassification")(config)
        images = _images(rng, (64, 128, 224))
        labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
        return lambda: functional.cross_entropy(network(images).logits, labels)

    return build


def _vit(model: str) -> Builder:
    def build(rng: np.random.Generator) -> Step:
        heads = one_of(rng, 3, 6, 8, 12, 16)
        images = _images(rng, (96, 224, 384))
        config = getattr(hf, f"{model}Config")(
            hidden_size=64 * heads,
            num_hidden_layers=multiple(rng, 2, 24),
            num_attention_heads=heads,
            intermediate_size=256 * heads,
            image_size=images.shape[-1],
            patch_size=one_of(rng, 8, 16, 32),
            num_labels=multiple(rng, 10, 1000),
        )
        network = getattr(hf, f"{model}ForImageClassification")(config)
        labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
        return lambda: functional.cross_entropy(network(images).logits, labels)

    return build


class _Block(nn.Module):
    """Residual block of a diffusion U-Net, with the embedding of the time step."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1)
        )
        self.time = nn.Linear(time, out)
        self.second = nn.Sequential(nn.GroupNorm(8, out), nn.SiLU(), nn.Conv2d(out, out, 3, 1, 1))
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) + self.time(functional.silu(time))[:, :, None, None]
        return self.second(hidden) + self.skip(x)


class _Unet(nn.Module):
    def __init__(self, width: int, levels: int, blocks: int, has_attention: bool) -> None:
        super().__init__()
        sizes = [width * 2 ** min(i, 3) for i in range(levels)]
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 256))
        self.width, self.start = width, nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up, channels = nn.ModuleList(), nn.ModuleList(), width
        for size in sizes:
            self.down.append(nn.ModuleList([_Block(channels, size, 256)]))
            self.down[-1].extend(_Block(size, size, 256) for _ in range(blocks - 1))
            channels = size
        for size in reversed(sizes):
            self.up.append(_Block(channels + size, size, 256))
            channels = size
        self.attention = nn.MultiheadAttention(sizes[-1], 4) if has_attention else None
        self.end = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-torch.arange(self.width // 2) / self.width)
        phases = time[:, None] * rates[None]
        embedded = self.time(torch.cat([phases.sin(), phases.cos()], 1))
        x, skips = self.start(x), []
        for level in self.down:
            for block in level:
                x = block(x, embedded)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        if self.attention is not None:
            tokens = x.flatten(2).permute(2, 0, 1)
            x = x + self.attention(tokens, tokens, tokens)[0].permute(1, 2, 0).view_as(x)
        for block in self.up:
            skip = skips.pop()
            x = block(
                torch.cat([functional.interpolate(x, size=skip.shape[-2:]), skip], 1), embedded
            )
        return self.end(x)


def _diffusion(rng: np.random.Generator) -> Step:
    images = _images(rng, (32, 64, 128))
    network = _Unet(
        multiple(rng, 32, 128, 16), multiple(rng, 2, 4), multiple(rng, 1, 3), bool(rng.integers(2))
    )
    time = torch.empty(len(images))

    def step() -> torch.Tensor:
        noise = torch.randn_like(images)
        return functional.mse_loss(network(images + noise, time), noise)

    return step


def _coder(rng: np.random.Generator, depth: int, width: int) -> tuple[nn.Module, nn.Module]:
    down: list[nn.Module] = []
    up: list[nn.Module] = []
    channels = 3
    for level in range(depth):
        out = min(width * 2**level, 512)
        down += [nn.Conv2d(channels, out, 4, 2, 1), nn.ReLU()]
        up = [nn.ConvTranspose2d(out, channels, 4, 2, 1), nn.ReLU(), *up]
        channels = out
    return nn.Sequential(*down), nn.Sequential(*up[:-1], nn.Sigmoid())


def _autoencoder(rng: np.random.Generator) -> Step:
    images, depth = _images(rng, (32, 64, 128)), multiple(rng, 2, 4)
    encoder, decoder = _coder(rng, depth, multiple(rng, 16, 64, 8))
    code, size = encoder(images).shape, multiple(rng, 8, 256)
    flat = int(np.prod(code[1:]))
    to_code, to_images = nn.Linear(flat, 2 * size), nn.Linear(size, flat)

    def step() -> torch.Tensor:
        mean, log_variance = to_code(encoder(images).flatten(1)).chunk(2, 1)
        sample = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        output = decoder(to_images(sample).view(code))
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        return functional.binary_cross_entropy(output, images) + divergence

    return step


def _gan(rng: np.random.Generator) -> Step:
    images, width = _images(rng, (32, 64, 128)), multiple(rng, 16, 64, 8)
    levels = int(np.log2(images.shape[-1])) - 2
    noise = torch.empty(len(images), multiple(rng, 64, 256), 1, 1)
    generator: list[nn.Module] = [nn.ConvTranspose2d(noise.shape[1], width * 2**levels, 4)]
    judge: list[nn.Module] = []
    channels = 3
    for level in range(levels, 0, -1):
        generator += [nn.BatchNorm2d(width * 2**level), nn.ReLU()]
        generator.append(nn.ConvTranspose2d(width * 2**level, width * 2 ** (level - 1), 4, 2, 1))
    generator += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 3, 3, 1, 1), nn.Tanh()]
    for level in range(levels):
        judge += [nn.Conv2d(channels, width * 2**level, 4, 2, 1), nn.LeakyReLU(0.2)]
        judge += [nn.BatchNorm2d(width * 2**level)] if level else []
        channels = width * 2**level
    judge.append(nn.Conv2d(channels, 1, 4))
    first, second = nn.Sequential(*generator), nn.Sequential(*judge)

    def step() -> torch.Tensor:
        made = first(noise)
        real, fake = second(images), second(made.detach())
        loss = functional.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        loss = loss + functional.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
        answer = second(made)
        return loss + functional.binary_cross_entropy_with_logits(answer, torch.ones_like(answer))

    return step


class _Depthwise(nn.Module):
    """Inverted residual block of a mobile network."""

    def __init__(self, channels: int, out: int, stride: int, growth: int) -> None:
        super().__init__()
        inner = growth * channels
        activation: Callable[[], nn.Module] = nn.Hardswish if growth > 4 else nn.ReLU6
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), activation(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner),
            activation(), nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.has_skip = stride == 1 and channels == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.has_skip else self.body(x)


def _mobile(rng: np.random.Generator) -> Step:
    images, classes = _images(rng, (96, 160, 224)), multiple(rng, 10, 1000)
    width, growth = multiple(rng, 8, 32, 8), one_of(rng, 3, 4, 6)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.Hardswish()]
    for _ in range(multiple(rng, 3, 5)):
        layers.append(_Depthwise(width, 2 * width, 2, growth))
        width *= 2
        layers += [_Depthwise(width, width, 1, growth) for _ in range(multiple(rng, 1, 4))]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
    return _classify(nn.Sequential(*layers), images, classes)


VISION: dict[str, tuple[Builder, ...]] = {
    "plain-cnn": (_plain,),
    "resnet": (_resnet("ResNet"), _resnet("RegNet")),
    "mobile-cnn": (_mobile,),
    "vision-transformer": (_vit("ViT"), _vit("DeiT")),
    "diffusion-unet": (_diffusion,),
    "autoencoder": (_autoencoder,),
    "gan": (_gan,),
}
