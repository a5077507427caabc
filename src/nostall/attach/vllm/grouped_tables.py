"""Task tables of vLLM's decode and verify steps, built on the device from its block table.

Sequences with the same leading pages read them once. The host neither waits nor copies: the same
launches serve both model runners of vLLM, and steps whose lengths only the device knows. Whether a
step shares anything is decided by its tables, so that one captured graph serves all steps of its
size.

vLLM allocates the buffers in the pool whose contents its sleep discards. Each build writes all that
the kernels of its step read, the queue included, so that they may hold anything before.

What the attention layers of a vLLM group compute, and what of it nostall's kernel lacks.

Everything that a layer fixes is compared here, once, before tables are made: vLLM's groups join
layers whose cache has one form, and their heads, windows and scales may differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from nostall.attach.vllm.counts import watch_prefixes
from nostall.attach.vllm.step_tables import LayerTables, StepDtypes, zero_step
from nostall.core.errors import BadInput
from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.launch import (
    FP8,
    AttentionBuffers,
    BatchTensors,
)
from nostall.serving.tables.device import DeviceBuilder, Prefixes, Totals
from nostall.serving.tables.prefix.direct_build import DirectBuild


class GroupedStepTables(LayerTables):
    """The tables of decodes and verifies of one group of layers, built anew for each step."""

    def warm_up(self, dtypes: StepDtypes, table_width: int) -> None:
        """Allocate the tables and compile the kernels, so that no step of a server waits for it."""
        builder = DeviceBuilder.of(self._settings, self.capacity, str(self.device))
        self._builder = builder
        self.buffers = AttentionBuffers.around(
            builder.tables, self.capacity.scratch_rows, self.shape.head_dim, builder.queue
        )
        ints = partial(torch.zeros, dtype=torch.int32, device=self.device)
        self._direct = self._find_direct_build(table_width)
        batch = self.batch(ints(2), ints(1), ints((1, table_width)))
        self.build(batch)
        self.attend(*zero_step(self.shape, dtypes, self.device), batch)
        builder.state.zero_()  # These builds are none of a step.
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)

    def _find_direct_build(self, table_width: int) -> DirectBuild | None:
        """Launches of a build with little host time, if they build a batch as Triton's do.

        All sequences of the batch share all pages but the last.
        """
        count = min(4, self.capacity.sequences)
        keys = (table_width - 1) * self.shape.page_size + 1
        ints = partial(torch.arange, dtype=torch.int32, device=self.device)
        table = ints(1, table_width + 1).repeat(count, 1)
        lengths = torch.full((count,), keys, dtype=torch.int32, device=self.device)
        prefixes = Prefixes(block_table=table, page_size=self.shape.page_size)
        return DirectBuild.of(self._builder, ints(count + 1), lengths, prefixes)

    def watch(self, layers: int) -> None:
        """Report what shared prefixes save in the steps of so many layers."""
        watch_prefixes(lambda: self.totals, layers)

    @property
    def totals(self) -> Totals:
        """Sums over all steps; waits for the device."""
        return self._builder.totals

    def build(self, batch: BatchTensors) -> None:
        """Build the tables of a step on the current stream."""
        direct = self._direct
        if direct is not None and direct(batch.query_starts, batch.kv_lengths, batch.block_table):
            return
        prefixes = Prefixes(block_table=batch.block_table, page_size=self.shape.page_size)
        self._builder.build(batch.query_starts, batch.kv_lengths, prefixes)


FP8_STORED = (torch.uint8, FP8)
"""Dtypes that vLLM gives a cache of fp8; the layers say which 8 bits it holds."""
HOST_DRAFTS = ("ngram", "suffix")
"""Methods of speculation whose drafts the host makes. With a draft model lengths change on the
device between the build of a step and its run, also inside of one captured graph."""


def layer_shape(impl: Any, page_size: int) -> AttentionShape:
    """What a layer computes. Raises :class:`BadInput` for heads or pages that are not allowed."""
    return AttentionShape(
        impl.num_heads,
        impl.num_kv_heads,
        impl.head_size,
        page_size=page_size,
        window=window_of(impl)[0] + 1,
    )


def window_of(impl: Any) -> tuple[int, int]:
    """Keys before and after a token's own that it sees, as FlashAttention has it; -1: all."""
    return impl.sliding_window or (-1, -1)


def model_lack(config: Any, spec: Any) -> str | None:
    """What nostall's kernel lacks for all layers of a group; None if it can serve some of them."""
    model, speculation = config.model_config, config.speculative_config
    lacks = {
        "layers of models with ranges that are not causal": model.is_mm_prefix_lm,
        "layers of models with a reference window": model.rswa_window is not None,
        "layers beside a draft model": speculation is not None
        and speculation.method not in HOST_DRAFTS,
        f"layers with a cache of {spec.dtype}": spec.dtype not in (model.dtype, *FP8_STORED),
        "layers whose values have heads of their own": getattr(spec, "head_size_v", spec.head_size)
        not in (None, spec.head_size),
    }
    return next((reason for reason, holds in lacks.items() if holds), None)


def drafts_of(config: Any) -> int:
    """Tokens that speculation adds to a sequence's step at most; 0 without it."""
    speculation = config.speculative_config
    return 0 if speculation is None else int(speculation.num_speculative_tokens or 0)


def group_shape(impls: Mapping[str, Any], page_size: int) -> AttentionShape:
    """The shape that most layers of a group have, of those that nostall can serve.

    Raises :class:`BadInput` if it can serve none.
    """
    shapes: Counter[AttentionShape] = Counter()
    lacks: Counter[str] = Counter()
    for impl in impls.values():
        lack = impl.find_lack()
        if lack is None:
            shapes[layer_shape(impl, page_size)] += 1
        else:
            lacks[lack] += 1
    if not shapes:
        raise BadInput(f"no layer that nostall serves ({', '.join(lacks) or 'none is known'})")
    return shapes.most_common(1)[0][0]


def layers_of(config: Any, names: Iterable[str], kind: type) -> dict[str, Any]:
    """vLLM's implementations of the layers with these names, as far as they are of a kind."""
    known = config.compilation_config.static_forward_context
    found = {}
    for name in names:
        impl: Any = getattr(known.get(name), "impl", None)
        variants = impl.get_impl_variants() if hasattr(impl, "get_impl_variants") else (impl,)
        own = [variant for variant in variants if isinstance(variant, kind)]
        found.update({f"{name}.{number}": variant for number, variant in enumerate(own)})
    return found
