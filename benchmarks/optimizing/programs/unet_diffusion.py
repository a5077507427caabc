"""Sample images with a diffusion model: a U-Net with attention, denoising steps and a decoder."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--best", choices=["default", "graphs"], help="torch.compile and channels_last")
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()


class Residual(nn.Module):
    def __init__(self, inputs, outputs, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        batch, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, 3, 4, channels // 4, height * width)
        q, k, v = (part.transpose(-1, -2) for part in qkv.unbind(1))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(batch, channels, height, width))


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        time = 4 * width
        self.width = width
        self.embed = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.begin = nn.Conv2d(4, width, 3, padding=1)
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList()
        last = width
        for size in sizes:
            blocks = nn.ModuleList([Residual(last, size, time), Residual(size, size, time)])
            self.down.append(blocks)
            last = size
        self.pools = nn.ModuleList(nn.Conv2d(s, s, 3, stride=2, padding=1) for s in sizes[:-1])
        self.middle = nn.ModuleList([Residual(last, last, time), Residual(last, last, time)])
        self.attention = Attention(last)
        self.up = nn.ModuleList()
        for size in reversed(sizes):
            self.up.append(
                nn.ModuleList([Residual(last + size, size, time), Residual(size, size, time)])
            )
            last = size
        self.norm, self.end = nn.GroupNorm(8, last), nn.Conv2d(last, 4, 3, padding=1)

    def forward(self, x, t):
        half = self.width // 2
        rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=x.device) / half)
        angles = t[:, None].float() * rates
        time = self.embed(torch.cat([angles.sin(), angles.cos()], dim=1).to(x.dtype))
        h, kept = self.begin(x), []
        for level, blocks in enumerate(self.down):
            for block in blocks:
                h = block(h, time)
            kept.append(h)
            if level < len(self.pools):
                h = self.pools[level](h)
        h = self.middle[1](self.attention(self.middle[0](h, time)), time)
        for blocks in self.up:
            skipped = kept.pop()
            if h.shape[-1] != skipped.shape[-1]:
                h = F.interpolate(h, scale_factor=2.0)
            h = torch.cat([h, skipped], dim=1)
            for block in blocks:
                h = block(h, time)
        return self.end(F.silu(self.norm(h)))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float32 if options.tiny else torch.float16
width, size, batch, denoising = (16, 16, 2, 5) if options.tiny else (160, 64, 4, 20)
unet = UNet(width).to(device, dtype).eval()
decoder = nn.Sequential(
    nn.Conv2d(4, 64, 3, padding=1), nn.SiLU(), nn.Upsample(scale_factor=4.0),
    nn.Conv2d(64, 3, 3, padding=1),
).to(device, dtype).eval()  # fmt: skip
if options.best:
    unet.to(memory_format=torch.channels_last)
    decoder.to(memory_format=torch.channels_last)
    torch.backends.cudnn.benchmark = True
    mode = "reduce-overhead" if options.best == "graphs" else "default"
    unet, decoder = torch.compile(unet, mode=mode), torch.compile(decoder, mode=mode)

alphas = torch.linspace(0.9999, 0.98, 1000, device=device).cumprod(0)
times = torch.linspace(999, 0, denoising + 1, device=device).long()
for step in range(options.steps):
    with torch.inference_mode():
        x = torch.randn(batch, 4, size, size, device=device, dtype=dtype)
        for now, then in zip(times[:-1], times[1:]):
            if options.best == "graphs":  # the next replay overwrites `noise`
                torch.compiler.cudagraph_mark_step_begin()
            noise = unet(x, now.expand(batch))
            clean = (x - (1 - alphas[now]).sqrt() * noise) / alphas[now].sqrt()
            x = (alphas[then].sqrt() * clean + (1 - alphas[then]).sqrt() * noise).to(dtype)
        image = decoder(x)
    print(f"step {step + 1} mean {image.float().mean().item():.4f}", flush=True)
