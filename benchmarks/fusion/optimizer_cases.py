"""Optimiser steps as users write them: the cases of ``fusion.optimizer_steps``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Shapes = Sequence[tuple[int, ...]]
Step = Callable[[], object]
Made = tuple[list[Tensor], Step]
"""The tensors that a step changes, and the step."""


def gpt2_shapes(small: bool) -> list[tuple[int, ...]]:
    """Shapes of the parameters of a GPT-2 of four layers, or of a small one."""
    width, vocabulary, layers = (16, 50, 1) if small else (768, 50257, 4)
    layer = [
        *((width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)),
        *((width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)),
    ]
    return [(vocabulary, width), (1024, width), *layer * layers, (width,), (width,)]


def llama_shapes(small: bool) -> list[tuple[int, ...]]:
    """Shapes of the 147 parameters of a Llama of 16 narrow layers, or of a small one."""
    width, hidden, vocabulary, layers = (16, 44, 50, 2) if small else (512, 1408, 32000, 16)
    layer = [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)] + [(width,)] * 2
    return [(vocabulary, width), *layer * layers, (width,), (vocabulary, width)]


@dataclass(frozen=True)
class Case:
    """One kind of step."""

    make: Callable[[Shapes, str, bool], Made]
    """Makes the step for shapes, a device, and whether PyTorch's fused optimiser runs."""
    bytes_per_element: int
    """Bytes that a step moves at least for an element of the parameters."""
    shapes: Callable[[bool], list[tuple[int, ...]]] = gpt2_shapes
    has_fused: bool = True


def _parameters(
    shapes: Shapes, device: str, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [
        nn.Parameter((0.02 * torch.randn(shape, device=device)).to(dtype)) for shape in shapes
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def _with_optimizer(
    optimizer: Any, clip: bool, shapes: Shapes, device: str, fused: bool, **options: Any
) -> Made:
    """A step of PyTorch's optimiser, after clipping if ``clip``: two graphs for torch.compile."""
    parameters = _parameters(shapes, device)
    chosen = optimizer(parameters, fused=fused or None, foreach=None if fused else True, **options)

    def step() -> None:
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        chosen.step()

    step()  # makes the state, so that it is part of no graph
    return _changed(parameters, chosen, clip), step


def _changed(parameters: Sequence[Tensor], optimizer: Any, clip: bool) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [p.grad for p in parameters if p.grad is not None] if clip else []
    return [*parameters, *gradients, *(x for x in states if isinstance(x, Tensor))]


def _adam(optimizer: Any, clip: bool, shapes: Shapes, device: str, fused: bool) -> Made:
    on_gpu = device == "cuda"
    rate = torch.tensor(1e-3, device=device) if on_gpu else 1e-3
    return _with_optimizer(optimizer, clip, shapes, device, fused, lr=rate, capturable=on_gpu)


def _one_graph(shapes: Shapes, device: str, fused: bool) -> Made:
    """Clipping and AdamW by their functions: one graph, because no ``step`` is called."""
    from torch.optim.adamw import adamw

    parameters = _parameters(shapes, device)
    gradients = [p.grad for p in parameters if p.grad is not None]
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    steps = [torch.ones((), device=device) for _ in parameters]

    @torch.no_grad()
    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        # On a CPU eager PyTorch computes bias corrections as Python numbers; torch.compile cannot.
        capturable = device == "cuda" or torch.compiler.is_compiling()
        adamw(
            parameters,
            gradients,
            first,
            second,
            [],
            steps,
            foreach=True,
            fused=False,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=1e-3,
            weight_decay=0.01,
            eps=1e-8,
            maximize=False,
            capturable=capturable,
        )

    return [*parameters, *gradients, *first, *second, *steps], step


def _clipping(shapes: Shapes, device: str, fused: bool) -> Made:
    parameters = _parameters(shapes, device)
    clip = partial(torch.nn.utils.clip_grad_norm_, parameters, 1.0, foreach=True)

    def step() -> object:
        return clip()

    return [p.grad for p in parameters if p.grad is not None], step


def _master_copy(shapes: Shapes, device: str, fused: bool) -> Made:
    """SGD with momentum of bf16 parameters, with momentum and a copy of them in fp32."""
    parameters = [p.detach() for p in _parameters(shapes, device, torch.bfloat16)]
    gradients = [torch.randn_like(p) for p in parameters]
    master = [p.float() for p in parameters]
    momentum = [torch.zeros_like(p) for p in master]

    def step() -> None:
        torch._foreach_mul_(momentum, 0.9)
        torch._foreach_add_(momentum, gradients)
        torch._foreach_add_(master, momentum, alpha=-1e-3)
        torch._foreach_copy_(parameters, master)

    return [*parameters, *master, *momentum], step


def _sgd(shapes: Shapes, device: str, fused: bool) -> Made:
    return _with_optimizer(torch.optim.SGD, False, shapes, device, fused, lr=1e-3, momentum=0.9)


CASES = {
    "AdamW": Case(partial(_adam, torch.optim.AdamW, False), 28),
    "clipping + AdamW": Case(partial(_adam, torch.optim.AdamW, True), 36),
    "clipping + AdamW, one graph": Case(_one_graph, 36, has_fused=False),
    "clipping": Case(_clipping, 12, has_fused=False),
    "clipping + AdamW, 147 tensors": Case(
        partial(_adam, torch.optim.AdamW, True), 36, llama_shapes
    ),
    "SGD with momentum": Case(_sgd, 20),
    "momentum, bf16 with fp32 copy": Case(_master_copy, 20, has_fused=False),
    "Adam": Case(partial(_adam, torch.optim.Adam, False), 28),
}
"""The bytes count each tensor that a step must read or write once, and with clipping the gradients
once more, because their norm has to be known before they are scaled."""
