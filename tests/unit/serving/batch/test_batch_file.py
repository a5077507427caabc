"""Batch files: what is written is read back, and a bad file is one clear error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.serving.batch.batch_file import dump_batch, load_batch
from nostall.serving.batch.examples import EXAMPLES, Draw, draw_batch, example
from nostall.serving.batch.ragged import RaggedBatch
from nostall.serving.errors import BadBatch


def same(left: RaggedBatch, right: RaggedBatch) -> bool:
    used = np.arange(left.block_table.shape[1]) < -(-left.kv_lengths // left.page_size)[:, None]
    arrays = ("query_lengths", "kv_lengths", "speculative")
    return (
        all(np.array_equal(getattr(left, name), getattr(right, name)) for name in arrays)
        and np.array_equal(left.block_table[used], right.block_table[:, : used.shape[1]][used])
        and (left.page_size, left.speculative_limit) == (right.page_size, right.speculative_limit)
        and left.prefix_groups == right.prefix_groups
        and all(
            np.array_equal(*pair)
            for pair in zip(
                [mask for mask in left.tree_masks if mask is not None],
                [mask for mask in right.tree_masks if mask is not None],
                strict=True,
            )
        )
    )


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_examples_survive_a_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "batch.json"
    file.write_text(dump_batch(example(name, page_size=64)))
    assert same(example(name, page_size=64), load_batch(file))


@given(seed=st.integers(0, 1000), has_trees=st.booleans())
def test_drawn_batches_fill_the_budget_and_survive_a_file(
    tmp_path_factory: pytest.TempPathFactory, seed: int, has_trees: bool
) -> None:
    draw = Draw(token_budget=300, decodes=9, verifies=3, has_trees=has_trees)
    batch = draw_batch([5, 700, 40], [3, 0, 90], draw, seed)
    assert batch.query_lengths.sum() == 300
    assert same(batch, draw_batch([5, 700, 40], [3, 0, 90], draw, seed))
    file = tmp_path_factory.mktemp("batch") / "batch.json"
    file.write_text(dump_batch(batch))
    assert same(batch, load_batch(file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "nostall-batch-2"}, "format: Input should be 'nostall-batch-1'"),
        ({"sequences": [{"query": 1, "keys": "2", "pages": [0]}]}, "sequences.0.keys"),
        ({"sequences": [{"query": 1, "keys": 20, "pages": [0]}]}, "needs more pages of 16 keys"),
        ({"pages": 1}, "pages: Extra inputs are not permitted"),
        (
            {"sequences": [{"query": 1, "keys": 1, "pages": [0], "tree": [[True], [True]]}]},
            "rows of the tree mask",
        ),
    ],
)
def test_a_bad_file_is_one_clear_error(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "batch.json"
    content = {"format": "nostall-batch-1", "page_size": 16, "sequences": []}
    file.write_text(json.dumps(content | change))
    with pytest.raises(BadBatch, match=rf"batch file .*batch.json: .*{message}"):
        load_batch(file)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "batch.json").write_bytes(b"\xff{")
    with pytest.raises(BadBatch, match="nostall serving batch` writes an example"):
        load_batch(tmp_path / "batch.json")


def test_unknown_examples_and_small_budgets_are_refused() -> None:
    with pytest.raises(BadBatch, match=r"example 'decodes' is unknown.*did you mean 'decode'"):
        example("decodes")
    with pytest.raises(BadBatch, match="need 64 query tokens, and the budget is 10"):
        draw_batch([5], [5], Draw(token_budget=10), 0)
    with pytest.raises(BadBatch, match="0 prompt and 0 output lengths"):
        draw_batch([], [], Draw(), 0)
