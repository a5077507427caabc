"""What vLLM's description of a step (``CommonAttentionMetadata``) says without the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nostall.attach.vllm.routing import MAX_VERIFY, StepKind, step_kind


class Part(NamedTuple):
    """The first sequences of a step."""

    sequences: int
    tokens: int
    """Query tokens of these sequences."""
    decodes: int
    """Those of the sequences that have one query token."""


def graph_size(common: Any) -> tuple[int, int]:
    """Sequences and tokens of a step, padded ones included: what tells captured graphs apart."""
    return common.num_reqs, common.num_actual_tokens


def kind_of(common: Any) -> StepKind:
    """The kind of a step."""
    # Most steps of a server are decodes, and the longest query decides that without an array.
    if common.max_query_len == 1 and common.num_actual_tokens:
        return StepKind.DECODE
    return step_kind(query_lengths_of(common))


def tokens_of(common: Any) -> int:
    """Query tokens of a step without padding."""
    return int(common.query_start_loc_cpu[common.num_reqs])


def short_part(common: Any, most_tokens: int) -> Part:
    """The sequences before the first that is longer than a verify, or exceeds ``most_tokens``.

    Padding at the end of a step belongs to it if nothing else is behind it.
    """
    lengths = query_lengths_of(common)
    is_short = (lengths <= MAX_VERIFY) & (np.cumsum(lengths) <= most_tokens)
    count = len(lengths) if is_short.all() else int(is_short.argmin())
    lengths = lengths[:count]
    return Part(count, int(lengths.sum()), int((lengths == 1).sum()))


def rest_of(common: Any, part: Part) -> Any:
    """vLLM's description of the sequences behind a part, as a step of their own.

    One kernel runs on the device for it, and the host waits for nothing.
    """
    rows = slice(part.sequences, common.num_reqs)
    starts = slice(part.sequences, common.num_reqs + 1)
    bounds = common.seq_lens_cpu_upper_bound
    return type(common)(
        query_start_loc=common.query_start_loc[starts] - part.tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[starts] - part.tokens,
        seq_lens=common.seq_lens[rows],
        seq_lens_cpu_upper_bound=None if bounds is None else bounds[rows],
        num_reqs=common.num_reqs - part.sequences,
        num_actual_tokens=common.num_actual_tokens - part.tokens,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        block_table_tensor=common.block_table_tensor[rows],
        slot_mapping=common.slot_mapping[part.tokens :],
    )


def query_lengths_of(common: Any) -> Any:
    """Query lengths of a step's sequences, int32; 0: padding."""
    return np.diff(common.query_start_loc_cpu[: common.num_reqs + 1].numpy())


def key_lengths_of(common: Any) -> Any:
    """Key lengths of a step's sequences, int32; upper bounds if the device knows them alone."""
    bounds = common.seq_lens_cpu_upper_bound
    lengths = common.seq_lens.cpu() if bounds is None else bounds
    return lengths[: common.num_reqs].numpy().astype(np.int32, copy=False)
