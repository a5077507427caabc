"""Small training jobs: a chain, a residual network whose skip connections cross cuts, a GPT-2.

They use double precision, so a difference from training in one process is an error, not rounding.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nostall.parallel.module import Job


def chain() -> Job:
    """Linear layers of different widths with tanh."""
    torch.manual_seed(0)
    widths = (6, 10, 4, 8, 6, 5)
    layers = [
        layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())
    ]
    module = nn.Sequential(*layers).double()
    return Job(module, (torch.randn(9, 6).double(),), torch.randn(9, 5).double(), F.mse_loss)


class Residual(nn.Module):
    """torchvision's BasicBlock with a given normalization layer."""

    def __init__(self, inside: int, outside: int, stride: int, norm: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = norm(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = norm(outside)
        self.downsample = None
        if stride != 1 or inside != outside:
            shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, norm(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1 = norm(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(4, 4, 1, norm))
        self.layer2 = nn.Sequential(Residual(4, 8, 2, norm))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


def resnet(norm: Any = group_norm) -> Job:
    """A small ResNet; ``norm`` creates a normalization layer from the number of channels."""
    torch.manual_seed(0)
    images = torch.randn(9, 3, 6, 6).double()
    return Job(ResNet(norm).double(), (images,), torch.randint(0, 5, (9,)), F.cross_entropy)


def gpt2() -> Job:
    """The unmodified GPT-2 of transformers, whose embedding and head share their weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=37,
        n_positions=12,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(0, 37, (9, 12))
    return Job(GPT2LMHeadModel(config).double(), {"input_ids": tokens}, tokens, next_token)


def next_token(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in double precision; the class's own loss is in single precision."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def frozen_first_half() -> Job:
    """The chain with trainable parameters in its second half only."""
    job = chain()
    for layer in list(job.module)[:6]:
        layer.requires_grad_(False)
    return job


class _Spectrum(nn.Module):
    """A layer whose output is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(torch.tanh(self.linear(x)))


class _FromSpectrum(nn.Module):
    """A layer whose input is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, spectrum: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.fft.irfft(spectrum))


def complex_cut() -> Job:
    """Two layers with a complex tensor between them."""
    torch.manual_seed(0)
    module = nn.Sequential(_Spectrum(), _FromSpectrum()).double()
    return Job(module, (torch.randn(9, 6).double(),), torch.randn(9, 5).double(), F.mse_loss)


class _Transposed(nn.Module):
    """A convolution whose result is no contiguous tensor."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(x)).transpose(2, 3)


def transposed() -> Job:
    """Layers that send tensors which are not contiguous."""
    torch.manual_seed(0)
    module = nn.Sequential(*(_Transposed(a, b) for a, b in ((3, 4), (4, 5), (5, 4), (4, 2))))
    images = torch.randn(9, 3, 6, 5).double()
    return Job(module.double(), (images,), torch.randn(9, 2, 6, 5).double(), F.mse_loss)


class _WithPenalty(nn.Module):
    """A layer that also returns the mean square of its output over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(self.linear(x))
        return y, y.pow(2).mean()


class _PassPenalty(nn.Module):
    """A layer that passes the penalty on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(
        self, values: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(values[0]), values[1]


def _loss_with_penalty(
    output: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor
) -> torch.Tensor:
    return F.mse_loss(output[0], targets) + 0.1 * output[1]


def penalty() -> Job:
    """Two layers; a scalar that is computed from samples crosses the cut between them."""
    torch.manual_seed(0)
    module = nn.Sequential(_WithPenalty(), _PassPenalty()).double()
    targets = torch.randn(9, 5).double()
    return Job(module, (torch.randn(9, 6).double(),), targets, _loss_with_penalty)


def batch_statistics_loss() -> Job:
    """The chain with a loss that is not a mean over samples: it has a standard deviation."""
    return replace(chain(), loss=lambda y, t: F.mse_loss(y, t) + 0.1 * y.std(0).mean())


def dropout() -> Job:
    """The chain with dropout, whose forward pass draws random numbers."""
    job = chain()
    return replace(job, module=nn.Sequential(*job.module, nn.Dropout(0.5)))


def killed_in_step_2() -> Job:
    """The chain, but rank 1 kills itself when it loads the batch of step 2."""
    import os
    import signal

    job = chain()

    def batches(step: int) -> Any:
        if step == 2 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return job.example_batch(8)

    return replace(job, batches=batches)


class _AbortsWhenDeleted:
    """Calls ``abort`` when the interpreter deletes it at finalization."""

    def __init__(self, abort: Any) -> None:
        self.abort = abort

    def __del__(self) -> None:
        self.abort()


def aborts_at_finalization() -> Job:
    """The chain, in a process that aborts when the interpreter is finalized.

    PyTorch's threads can cause that.  A thread and an exit handler each print a line before.
    """
    import atexit
    import os
    import sys
    import threading

    atexit.register(print, "from the exit handler")
    threading.Timer(1.0, print, ["from the thread"]).start()
    sys.aborts_when_deleted = _AbortsWhenDeleted(os.abort)  # type: ignore[attr-defined]
    return chain()
