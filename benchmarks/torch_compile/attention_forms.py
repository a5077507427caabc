"""Does attention that programs write as products and a softmax gain from one call of it?

    python -m benchmarks run torch_compile.attention_forms --out OUT [--forms A,B] [--limit 200]

Forms: key-value groups that are repeated, soft caps, ALiBi, segment ids, padding, a bias, dropout;
forward and backward in bf16.  BERT of six layers forward has a mask of ones beside it, which users
can pass.  Errors are relative to fp64.  OUT is saved after each form.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusion.unseen.deployed import Case, Settings, measure, summary_line
from benchmarks.harness.result_file import load, save
from nostall.attach.torch_compile.graph_key import device_name
from nostall.core.errors import one_line

F = torch.nn.functional
BATCH, HEADS, GROUPS, LENGTH, WIDTH = 4, 16, 4, 1024, 128
SHARES_GPU = True
"""Processes of other benchmarks may run beside this one: each takes turns on the GPU to time."""


def causal(x: Tensor) -> Tensor:
    """True where a query must not see a key."""
    length = x.shape[-2]
    return torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values of groups, repeated; a causal mask, as Hugging Face's eager attention."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(causal(q), torch.finfo(q.dtype).min)
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores with a soft cap, as Gemma 2 has them."""
    scores = 30.0 * torch.tanh(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) / 30.0)
    scores = scores.masked_fill(causal(q), torch.finfo(q.dtype).min)
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias of distances, which also hides the future."""
    heads, length = q.shape[1], q.shape[2]
    slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, device=q.device))
    at = torch.arange(length, device=q.device)
    bias = -slopes[:, None, None] * (at[:, None] - at).abs()
    bias = bias.masked_fill(causal(q), float("-inf")).to(q.dtype)
    return torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + bias, -1) @ v


def two_masks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ALiBi as MPT has it: a bias, then a causal mask."""
    heads, length = q.shape[1], q.shape[2]
    slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, device=q.device))
    at = torch.arange(length, device=q.device)
    bias = (-slopes[:, None, None] * (at[:, None] - at).abs()).to(q.dtype)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + bias
    scores = scores.masked_fill(causal(q), torch.finfo(q.dtype).min)
    return torch.softmax(scores, -1) @ v


def segments(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Packed sequences: a token sees those with its segment's number."""
    same = ids[:, None, :, None] == ids[:, None, None, :]
    scores = torch.where(same, q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]), float("-inf"))
    return torch.softmax(scores, -1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, is_token: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~is_token[:, None, None, :], torch.finfo(q.dtype).min)
    return torch.softmax(scores, -1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A learnt bias of pairs, which has a gradient."""
    return torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + bias, -1) @ v


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).masked_fill(causal(q), -torch.inf)
    return F.dropout(torch.softmax(scores, -1), 0.1) @ v


def inputs(small: bool, groups: int, *further: Callable[[int, str], Tensor]) -> Any:
    """What makes query, key, value and further inputs; all floats have gradients."""
    batch, heads, length, width = (2, 4, 16, 8) if small else (BATCH, HEADS, LENGTH, WIDTH)
    few = heads if not groups else (2 if small else groups)

    def make(device: str) -> list[Tensor]:
        draw = torch.Generator(device).manual_seed(0)
        made = [
            torch.randn(batch, count, length, width, device=device, generator=draw)
            for count in (heads, few, few)
        ]
        made += [each(length, device) for each in further]
        return [x.bfloat16().requires_grad_() if x.is_floating_point() else x for x in made]

    def shaped(device: str) -> list[Tensor]:
        return [x if x.dim() != 2 else x[:batch].contiguous() for x in make(device)]

    return shaped


def _ids(length: int, device: str) -> Tensor:
    return (torch.arange(length, device=device) * 5 // length).expand(BATCH, -1)


def _is_token(length: int, device: str) -> Tensor:
    at = torch.arange(length, device=device)
    return at < torch.arange(length, length - BATCH, -1, device=device)[:, None] - length // 8


def _bias(small: bool) -> Callable[[int, str], Tensor]:
    heads = 4 if small else HEADS
    return lambda length, device: torch.randn(1, heads, length, length, device=device)


def bert(small: bool) -> Case:
    """BERT forward; beside it with a mask of ones."""
    from benchmarks.torch_compile.model_zoo.user_models import Sizes
    from benchmarks.torch_compile.model_zoo.user_models import bert as make

    torch.manual_seed(0)
    module, (tokens,) = make(Sizes(small), False)
    whole = module.eval().requires_grad_(False)
    masked = torch.ones_like(tokens)

    def on(device: str) -> Any:
        return whole.to(device, torch.bfloat16)

    def plain(tokens: Tensor) -> Any:
        return whole(tokens)

    def with_mask(tokens: Tensor, mask: Tensor) -> Any:
        return whole.model(input_ids=tokens, attention_mask=mask).logits

    def given(device: str) -> list[Tensor]:
        on(device)
        return [tokens.to(device)]

    others = {"a mask of ones": (with_mask, lambda device: [*given(device), masked.to(device)])}
    return Case("BERT forward", plain, given, others, exact=False)


def forms(small: bool) -> Mapping[str, Callable[[], Case]]:
    """The cases by name."""
    plain: Mapping[str, tuple[Callable[..., Tensor], int, Sequence[Any]]] = {
        "groups": (grouped, GROUPS, ()),
        "ALiBi": (alibi, 0, ()),
        "segment ids": (segments, 0, (_ids,)),
        "padding": (padded, 0, (_is_token,)),
        "a learnt bias": (biased, 0, (_bias(small),)),
        "soft cap": (capped, 0, ()),
        "ALiBi and a mask": (two_masks, 0, ()),
        "dropout": (dropped, 0, ()),
    }
    made: dict[str, Callable[[], Case]] = {"BERT forward": lambda: bert(small)}
    for name, (function, groups, further) in plain.items():
        make = inputs(small, groups, *further)
        made[name] = lambda n=name, f=function, m=make: Case(n, f, m)  # type: ignore[misc]
    return made


def main(options: argparse.Namespace) -> None:
    """Measure the selected forms."""
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU is visible; run this on a machine with a GPU, or use --small --device cpu")
    end = time.monotonic() + options.limit
    wanted = [each for each in options.forms.split(",") if each]
    done: dict[str, Any] = load(options.out)["forms"] if options.out.exists() else {}
    settings = Settings(options.device, options.seconds, forced=options.forced)
    for name, make in forms(options.small).items():
        if name in done or (wanted and name not in wanted):
            continue
        if time.monotonic() > end:
            print(f"{name}: the time was up", flush=True)
            continue
        try:
            done[name] = measure(make(), settings)
            print(summary_line(done[name]), flush=True)
        except Exception as error:  # the other forms are measured
            print(f"{name}: {one_line(error)[:300]}", flush=True)
        gpu = device_name(torch.device(options.device))
        save(options.out, kind="measured", torch=torch.__version__, gpu=gpu, forms=done)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--forms", default="", help="names, separated by commas; default: all")
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds of one comparison")
    parser.add_argument("--limit", type=float, default=200, help="no form starts behind it")
    parser.add_argument("--forced", action="store_true", help="time the stitched version, too")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")
