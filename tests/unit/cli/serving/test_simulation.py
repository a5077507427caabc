"""What ``nostall serving simulate --read-once`` shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nostall.cli.serving.app import app
from nostall.cli.serving.simulation import UNSHARED_REMARK
from nostall.core.errors import BadInput
from nostall.serving.simulate.engine import READ_ONCE_SEQUENCES


def trace(path: Path, *, shares: bool) -> Path:
    """Prompts of three blocks, of which the requests share two or none."""
    lines = []
    for number in range(READ_ONCE_SEQUENCES + 7):
        hashes = [1, 2, 3 + number] if shares else [3 * number + place for place in range(3)]
        row = {"timestamp": 0, "input_length": 1536, "output_length": 50, "hash_ids": hashes}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))
    return path


def shown(*arguments: object) -> str:
    done = CliRunner().invoke(
        app, ["simulate", *map(str, arguments), "-q"], env={"COLUMNS": "80"},
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize("shares", [True, False])
def test_each_policy_has_a_column_for_decodes_that_read_once(shares: bool, tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", shares=shares)
    output = shown(path, "--read-once", "--policy", "vllm")
    assert output.splitlines()[1].split() == ["metric", "vllm", "vllm,", "read", "once"]
    assert (UNSHARED_REMARK.format(fewest=READ_ONCE_SEQUENCES) in output) == (not shares)
    found = json.loads(shown(path, "--read-once", "--format", "json"))["policies"]
    assert [(row["policy"], row["reads_once"]) for row in found] == [
        ("vllm", False), ("vllm", True), ("xy-serve", False), ("xy-serve", True),
    ]  # fmt: skip
    apart, once = (row["busy_s"] for row in found[:2])
    assert (once < apart) == shares
    alone = json.loads(shown(path, "--format", "json"))["policies"]
    assert alone == [row for row in found if not row["reads_once"]]


def test_a_trace_of_requests_that_do_not_fit_is_refused(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", shares=False)
    with pytest.raises(BadInput, match="no request fits into the KV cache of 1,000 tokens"):
        shown(path, "--kv-tokens", 1000)
    one = tmp_path / "one.jsonl"
    one.write_text(path.read_text().splitlines()[0])
    assert "one.jsonl has 1 request, so" in shown(one, "--requests", 2)
