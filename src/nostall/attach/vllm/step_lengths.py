"""What vLLM's description of a step (``CommonAttentionMetadata``) says without the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from nostall.attach.vllm.routing import StepKind, step_kind


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


def query_lengths_of(common: Any) -> Any:
    """Query lengths of a step's sequences, int32; 0: padding."""
    return np.diff(common.query_start_loc_cpu[: common.num_reqs + 1].numpy())


def key_lengths_of(common: Any) -> Any:
    """Key lengths of a step's sequences, int32; upper bounds if the device knows them alone."""
    bounds = common.seq_lens_cpu_upper_bound
    lengths = common.seq_lens.cpu() if bounds is None else bounds
    return lengths[: common.num_reqs].numpy().astype(np.int32, copy=False)
