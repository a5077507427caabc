"""The Token-Table and the summary of a batch whose sequences share a prefix."""

from __future__ import annotations

from nostall.serving.batch.examples import make_batch
from nostall.serving.batch.ragged import PrefixGroup, Stage
from nostall.serving.tables.costs import TileSet
from nostall.serving.tables.host import build_tables
from nostall.serving.tables.settings import TableSettings
from nostall.serving.tables.summary import summarize, token_table


def test_a_group_that_pays_has_a_row_and_units_of_its_own() -> None:
    group = PrefixGroup((2, 0, 1, 4), 1040)
    batch = make_batch([1, 1, 1, 40, 1], [2000] * 5, prefix_groups=[group])
    settings = TableSettings(32, 8, 16, TileSet((16, 64), least_prefix=256))
    *sequences, of_group = token_table(batch, settings)
    assert [row.shared for row in sequences] == [1024, 1024, 1024, 0, 1024]
    assert of_group == (Stage.PREFIX, 0, 0, 4, 1024, 1024, 0)
    kinds = summarize(batch, build_tables(batch, settings), settings).kinds
    assert {kind.stage: kind.keys for kind in kinds} == {
        "prefill": 8 * sum(1960 + min(start + 16, 40) for start in (0, 16, 32)),
        "decode": 8 * 4 * (2000 - 1024),
        "prefix": 8 * 1024,
    }
