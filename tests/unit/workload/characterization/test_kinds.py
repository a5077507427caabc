"""Labels of traces: documents of traces, labelled programs in a file, and the command's output."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the learners need the extra nostall[learn]")

from typer.testing import CliRunner

from nostall.cli import app
from nostall.core.errors import BadInput, BadTrace, MissingPart
from nostall.workload.characterization import kinds
from nostall.workload.characterization.kinds import (
    characterize_kinds,
    label_unnamed_kernels,
    learn,
    require_learners,
    trace_document,
)
from nostall.workload.learning.documents import read_documents
from nostall.workload.traces.launches import read_launches
from nostall.workload.traces.work_kinds import matching_rule

H200 = Path(__file__).parents[1] / "h200"
"""Traces of training steps of known models on an H200."""


def write_trace(path: Path, operators: dict[str, int]) -> Path:
    """A trace of the host: so many calls of each operator."""
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "ts": 10.0 * n, "dur": 5.0, "pid": 1, "tid": 1}
        for n, name in enumerate(o for o, count in operators.items() for _ in range(count))
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_trace_is_a_document_of_its_operators() -> None:
    document = trace_document(H200 / "resnet.json.gz")
    assert document.counts["convolution"] == 53
    assert "empty" not in document.counts


def test_the_traces_of_known_models_are_of_known_kinds() -> None:
    result = characterize_kinds([H200 / "resnet.json.gz", H200 / "bert.json.gz"], None)
    assert result.labels[0].kind == "resnet"
    assert result.labels[0].nearest[0].kind == "resnet"
    assert json.loads(json.dumps(result.as_json()))["traces"][0]["nearest"]


def test_learnt_traces_label_others(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.json.gz"
    cnn = {"aten::convolution": 9, "aten::relu": 9, "aten::mm": 1}
    mlp = {"aten::addmm": 9, "aten::relu": 8}
    for kind, operators in (("cnn", cnn), ("mlp", mlp)):
        paths = [
            write_trace(tmp_path / f"{kind}{n}.json", {o: c * n for o, c in operators.items()})
            for n in (1, 2, 3)
        ]
        learn(paths, kind, corpus)
    assert len(read_documents(corpus)) == 6
    learn([tmp_path / "mlp1.json"], "mlp", corpus)
    assert len(read_documents(corpus)) == 6, "a trace replaces itself"
    other = write_trace(tmp_path / "other.json", {o: c * 5 for o, c in mlp.items()})
    assert characterize_kinds([other], corpus).labels[0].kind == "mlp"
    outside = write_trace(tmp_path / "outside.json", {"aten::fft_r2c": 5})
    result = characterize_kinds([other, outside], corpus)
    assert len(result.labels) == 1 and "outside.json" in result.skip_reasons[0]


def test_what_cannot_be_learnt_is_named(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "a.json", {"aten::mm": 3})
    with pytest.raises(BadInput, match="give --kind"):
        learn([trace], " ", tmp_path / "corpus.json.gz")
    empty = write_trace(tmp_path / "b.json", {"aten::empty": 3})
    with pytest.raises(BadTrace, match="records no PyTorch operators"):
        learn([empty], "mlp", tmp_path / "corpus.json.gz")


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "find_spec", lambda name: None)
    with pytest.raises(MissingPart, match=r"pip install 'nostall\[learn\]'") as raised:
        require_learners()
    assert raised.value.exit_code == 3


def test_the_command_learns_and_shows_kinds_and_operators(tmp_path: Path) -> None:
    corpus, page = str(tmp_path / "own.json.gz"), tmp_path / "page.html"
    for kind, operator in (("cnn", "aten::convolution"), ("mlp", "aten::addmm")):
        paths = [
            str(write_trace(tmp_path / f"{kind}{n}.json", {operator: 9 * n, "aten::relu": 8 * n}))
            for n in (1, 2)
        ]
        done = CliRunner().invoke(app, ["characterize", *paths, "--learn", corpus, "--kind", kind])
        assert done.exit_code == 0, done.output
    assert "4 labelled programs" in done.output
    trace, options = str(H200 / "resnet.json.gz"), ["--corpus", corpus, "--report", str(page)]
    done = CliRunner().invoke(app, ["characterize", trace, "--explain", "--quiet", *options])
    assert done.exit_code == 0, done.output
    assert "kinds of the traces" in done.output and "operators that decide" in done.output
    assert "Kinds of the traces" in page.read_text()


def test_kernels_that_no_rule_names_get_a_learnt_kind() -> None:
    result = CliRunner().invoke(
        app, ["characterize", str(H200 / "resnet.json.gz"), "--kinds"], env={"COLUMNS": "160"}
    )
    assert result.exit_code == 0
    assert "kernels that no rule names" in result.output and "learnt kind" in result.output
    kernels = characterize_kinds([H200 / "resnet.json.gz"], None).as_json()["unnamed_kernels"]
    assert 0 < len(kernels) <= 10
    assert all(matching_rule(kernel["kernel"]) is None for kernel in kernels)
    batch_norm = next(k for k in kernels if "batch_norm" in k["kernel"])
    assert batch_norm["learnt_kind"] == "memory-bound" and batch_norm["probability"] > 0.8


def test_a_renamed_product_is_a_product_by_its_launch_parameters(tmp_path: Path) -> None:
    """Names removed: the matrix products of a trace get their kind all the same."""
    text = gzip.decompress((H200 / "bert.json.gz").read_bytes()).decode()
    products = {row.name for row in read_launches(H200 / "bert.json.gz")[:40] if (
        (rule := matching_rule(row.name)) is not None and rule.what == "matrix product"
    )}  # fmt: skip
    assert products
    for number, name in enumerate(sorted(products)):
        text = text.replace(json.dumps(name), f'"mystery{number}"')
    (tmp_path / "renamed.json").write_text(text)
    kernels = label_unnamed_kernels([tmp_path / "renamed.json"])
    found = [kernel.kind for kernel in kernels if kernel.name.startswith("mystery")]
    assert found.count("matrix product") >= 0.8 * len(found) > 0
