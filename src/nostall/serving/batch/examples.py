"""Generators of batches: measured examples, seeded draws of lengths, and unusual lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nostall.core.text.suggest import unknown
from nostall.serving.batch.checks import check_batch
from nostall.serving.batch.ragged import Bools, PrefixGroup, RaggedBatch, tree_mask
from nostall.serving.errors import BadBatch


class Part(NamedTuple):
    """Equal sequences of a batch."""

    sequences: int
    query: int
    """Query tokens of each."""
    keys: int
    """Keys of each, those of the query included."""
    speculative: bool = False


EXAMPLES: dict[str, tuple[Part, ...]] = {
    "mixed": (Part(64, 1, 4096), Part(1, 2048, 8192)),
    "decode-verify": (Part(128, 1, 2048), Part(4, 32, 4096, True)),
    "decode": (Part(256, 1, 1024),),
    "verify": (Part(8, 16, 4096, True),),
    "prefill": (Part(4, 1024, 1024),),
}
"""Example batches by name."""


def example(name: str, page_size: int = 16, seed: int = 0) -> RaggedBatch:
    """An example batch; the seed draws the order of its pages."""
    if name not in EXAMPLES:
        raise BadBatch(unknown("example", name, EXAMPLES))
    parts = EXAMPLES[name]
    return make_batch(
        [part.query for part in parts for _ in range(part.sequences)],
        [part.keys for part in parts for _ in range(part.sequences)],
        [part.speculative for part in parts for _ in range(part.sequences)],
        page_size=page_size,
        seed=seed,
    )


def make_batch(
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    speculative: Sequence[bool] = (),
    *,
    tree_masks: Sequence[Bools | None] = (),
    page_size: int = 16,
    prefix_groups: Sequence[PrefixGroup] = (),
    seed: int = 0,
) -> RaggedBatch:
    """A checked batch of these lengths.

    Its pages are a seeded permutation; only the members of a prefix group have pages in common.
    """
    keys = np.array(kv_lengths, np.int32)
    pages = -(-keys // page_size)
    numbers = np.random.default_rng(seed).permutation(int(pages.sum())).astype(np.int32)
    table = np.full((len(keys), max(int(pages.max(initial=0)), 1)), -1, np.int32)
    table[np.arange(table.shape[1])[None, :] < pages[:, None]] = numbers
    for group in sorted(prefix_groups, key=lambda group: group.tokens):
        shared = group.tokens // page_size
        table[list(group.sequences), :shared] = table[group.sequences[0], :shared]
    batch = RaggedBatch(
        np.array(query_lengths, np.int32),
        keys,
        table,
        page_size,
        np.array(speculative or [False] * len(keys), np.bool_),
        tuple(tree_masks),
        prefix_groups=tuple(prefix_groups),
    )
    check_batch(batch)
    return batch


class Draw(NamedTuple):
    """What a random step contains."""

    token_budget: int = 4096
    """Query tokens of the step at most."""
    decodes: int = 64
    verifies: int = 0
    draft_tokens: int = 8
    """Query tokens of a verify."""
    has_trees: bool = False
    """Whether verifies have random tree masks."""
    page_size: int = 16


def draw_batch(
    prompts: Sequence[int], outputs: Sequence[int], draw: Draw, seed: int
) -> RaggedBatch:
    """A random step of requests whose prompt and output lengths are drawn from a trace.

    Decodes and verifies are at a uniform point of their output. Prefill chunks fill the rest of the
    token budget; the first of them continues at a uniform point of its prompt. Each of ``prompts``
    and ``outputs`` has one entry for each request, in tokens.
    """
    rng = np.random.default_rng(seed)
    if not len(prompts) or len(prompts) != len(outputs):
        raise BadBatch(
            f"{len(prompts)} prompt and {len(outputs)} output lengths; give one of each for each "
            "of one or more requests"
        )
    queries: list[int] = []
    keys: list[int] = []
    for length in [1] * draw.decodes + [draw.draft_tokens] * draw.verifies:
        request = int(rng.integers(len(prompts)))
        generated = int(rng.integers(max(outputs[request], 1)))
        queries.append(length)
        keys.append(prompts[request] + generated + length)
    left = draw.token_budget - sum(queries)
    if left < 0:
        raise BadBatch(
            f"{draw.decodes} decodes and {draw.verifies} verifies need {sum(queries)} query "
            f"tokens, and the budget is {draw.token_budget}; give a larger budget"
        )
    is_first = True
    while left > 0:
        prompt = max(int(prompts[int(rng.integers(len(prompts)))]), 1)
        done = int(rng.integers(prompt)) if is_first else 0
        taken = min(prompt - done, left)
        queries.append(taken)
        keys.append(done + taken)
        left -= taken
        is_first = False
    decode_and_verify = draw.decodes + draw.verifies
    is_verify = [draw.decodes <= place < decode_and_verify for place in range(len(queries))]
    masks: list[Bools | None] = []
    if draw.has_trees:
        masks = [
            random_tree(draw.draft_tokens, rng) if verifies else None for verifies in is_verify
        ]
    return make_batch(
        queries, keys, is_verify, tree_masks=masks, page_size=draw.page_size, seed=seed
    )


def random_tree(tokens: int, rng: np.random.Generator) -> Bools:
    """The mask of a random tree: each token's parent is uniform among the tokens before it."""
    return tree_mask([int(rng.integers(token)) if token else -1 for token in range(tokens)])


def odd_batch(
    rng: np.random.Generator,
    page_size: int,
    *,
    seed: int = 0,
    has_prefixes: bool = False,
    has_trees: bool = False,
) -> RaggedBatch:
    """A batch of odd lengths; ``seed`` draws the order of its pages.

    ``has_prefixes``: add sequences with short queries, and groups of sequences that share a prefix.
    ``has_trees``: give half of the sequences of 2 to 32 query tokens a random tree mask.
    """
    queries, keys = draw_lengths(rng, page_size)
    groups: list[PrefixGroup] = []
    if has_prefixes:
        for _ in range(int(rng.integers(2, 9))):
            query = int(rng.choice([1, 1, 1, 2, 5, 17]))
            queries.append(query)
            keys.append(query + int(rng.integers(300, 3000)))
        groups = _draw_groups(rng, np.array(keys) - np.array(queries), page_size)
    masks: list[Bools | None] = []
    if has_trees:
        masks = [
            random_tree(query, rng) if 1 < query <= 32 and rng.random() < 0.5 else None
            for query in queries
        ]
    return make_batch(
        queries,
        keys,
        [mask is not None for mask in masks],
        tree_masks=masks,
        page_size=page_size,
        prefix_groups=groups,
        seed=seed,
    )


def draw_lengths(rng: np.random.Generator, page: int) -> tuple[list[int], list[int]]:
    """Query and KV lengths of a batch: empty, one token, odd, at borders of pages and tiles."""
    borders = [0, 1, 2, page - 1, page, page + 1, 31, 32, 33, 127, 128, 129, 255, 257]
    queries, keys = [], []
    for _ in range(int(rng.integers(1, 9))):
        query = int(rng.choice(borders)) if rng.random() < 0.6 else int(rng.integers(1, 1200))
        context = [0, int(rng.choice(borders)), int(rng.integers(0, 3000))][int(rng.integers(3))]
        queries.append(query)
        keys.append(query + context if query else 0)
    return queries, keys


def _draw_groups(
    rng: np.random.Generator, before: NDArray[np.int64], page_size: int
) -> list[PrefixGroup]:
    """Groups of the sequences that have at least 256 keys ``before`` their queries, and groups
    within them that share more."""
    free = rng.permutation(np.flatnonzero(before >= 256)).tolist()
    groups = []
    while len(free) > 1:
        count = int(rng.integers(2, len(free) + 1))
        members, free = free[:count], free[count:]
        pages = int(rng.integers(1, before[members].min() // page_size + 1))
        groups.append(PrefixGroup(tuple(members), pages * page_size))
        inner = members[: count // 2]
        more = int(before[inner].min(initial=1 << 20)) // page_size
        if len(inner) > 1 and more > pages:
            pages = int(rng.integers(pages + 1, more + 1))
            groups.append(PrefixGroup(tuple(inner), pages * page_size))
    return groups


def unowned_slots(ragged: RaggedBatch) -> Bools:
    """Whether no sequence has a key in a slot, shape (pages, page size); no kernel may use it."""
    pages = int(np.max(ragged.block_table, initial=0)) + 1
    is_free = np.ones((pages, ragged.page_size), np.bool_)
    for sequence, length in enumerate(ragged.kv_lengths.tolist()):
        at = np.arange(length)
        is_free[ragged.block_table[sequence, at // ragged.page_size], at % ragged.page_size] = False
    return is_free
