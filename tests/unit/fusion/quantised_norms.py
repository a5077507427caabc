"""Residual, norm and quantisation as users write them, run by stitched kernels in the interpreter.

``python -m tests.unit.fusion.quantised_norms FOLDER`` prints the wrong results of each program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tools.interpreters.triton_interpreter import prepare
from torch import Tensor
from torch.nn import functional

from nostall.fusion.capture import inference_graph
from nostall.fusion.fuse import StitchedModule, stitch_module
from tests.unit.fusion.products.programs import AsModule

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What a scale maps the largest element of a row or a block to."""

Quantised = tuple[Tensor, ...]
Norm = Callable[[Tensor, Tensor], Tensor]
Quantisation = Callable[[Tensor], Quantised]


def hand_written_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return normed.to(x.dtype) * weight


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, 1e-6)


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight)


NORMS: dict[str, Norm] = {
    "hand-written rms norm": hand_written_norm,
    "rms norm": rms_norm,
    "layer norm": layer_norm,
}


def narrow(x: Tensor, dtype: torch.dtype) -> Quantised:
    """Quantisation with one scale for each last axis."""
    largest = LARGEST[dtype]
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / largest
    scaled = x / scale
    scaled = scaled.round() if dtype == torch.int8 else scaled
    return scaled.clamp(-largest, largest).to(dtype), scale


def by_row(dtype: torch.dtype) -> Quantisation:
    return lambda y: narrow(y.float(), dtype)


def by_block(dtype: torch.dtype, block: int = 128) -> Quantisation:
    def quantise(y: Tensor) -> Quantised:
        numbers, scale = narrow(y.float().view(*y.shape[:-1], -1, block), dtype)
        return numbers.view(y.shape), scale.squeeze(-1)

    return quantise


QUANTISATIONS: dict[str, Quantisation] = {
    "int8 by row": by_row(torch.int8),
    "fp8 by row": by_row(torch.float8_e4m3fn),
    "int8 by block": by_block(torch.int8),
    "fp8 by block": by_block(torch.float8_e4m3fn),
}


def chain(norm: Norm, quantise: Quantisation) -> Callable[..., Quantised]:
    """The new residual, the quantised norm and its scales."""

    def program(x: Tensor, residual: Tensor, weight: Tensor) -> Quantised:
        total = x + residual
        return total, *quantise(norm(total, weight))

    return program


def static_chain(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Quantised:
    """As :func:`chain`, with one scale for the whole tensor, which is known before."""
    total = x + residual
    scaled = rms_norm(total, weight).float() * scale
    return total, scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def swiglu(gate: Tensor, up: Tensor) -> Quantised:
    return by_block(torch.float8_e4m3fn)(functional.silu(gate) * up)


def stitched(
    program: Callable[..., Quantised], *inputs: Tensor, folder: Path | None = None
) -> StitchedModule:
    return stitch_module(inference_graph(AsModule(program), *inputs), folder=folder)


def wrong_results(name: str, quantise: str, dtype: torch.dtype, folder: Path) -> Iterator[str]:
    """Results that differ from those in fp64 by more than the rounding of their dtypes.

    Of fp8 only the scales: the interpreter's conversion to fp8 is wrong.
    """
    program = chain(NORMS[name], QUANTISATIONS[quantise])
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, 640, dtype=dtype), torch.randn(2, 3, 640, dtype=dtype)
    weight = torch.rand(640, dtype=dtype) + 0.5
    module = stitched(program, x, residual, weight, folder=folder)
    if module.kernels != 1:
        yield f"{module.kernels} kernels"
    total, numbers, scale = module(x, residual, weight)
    if not torch.equal(total, x + residual):
        yield "another residual"
    exact = NORMS[name]((x + residual).double(), weight.double())
    blocks = exact.view(*scale.shape[:2], -1, exact.shape[-1] // scale.shape[-1])
    expected = blocks.abs().amax(-1) / LARGEST[numbers.dtype]
    # The norm of a 16-bit tensor is rounded to 16 bits, once or twice, before it is quantised.
    rounding = 2e-6 if dtype == torch.float32 else 2.0**-10
    if not torch.allclose(scale.double(), expected, rtol=rounding, atol=0.0):
        yield f"scales are off by {(scale.double() / expected - 1).abs().max():.2e}"
    if numbers.dtype == torch.int8:
        steps = scale.double()[..., None]
        errors = (numbers.double().view(blocks.shape) * steps - blocks).abs()
        wrong = int((errors > 1.01 * (0.5 * steps + rounding * blocks.abs())).sum())
        if wrong:
            yield f"{wrong} numbers are wrong"


def main() -> None:
    folder = Path(sys.argv[1])
    prepare()
    torch.set_num_threads(1)
    dtypes = (torch.float32, torch.float16)
    print(
        json.dumps(
            {
                f"{name}, {quantise}": [
                    f"{dtype}: {text}"
                    for dtype in dtypes
                    for text in wrong_results(name, quantise, dtype, folder)
                ]
                for name in NORMS
                for quantise in QUANTISATIONS
            }
        )
    )


if __name__ == "__main__":
    main()
