"""Operator documents, their labels, and new kinds among those without a label."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the learners need the extra nostall[learn]")

from nostall.core.errors import BadInput
from nostall.workload.learning.documents import (
    Document,
    canonical_operator,
    read_documents,
    word,
    write_documents,
)
from nostall.workload.learning.labeller import KindLabeller, find_new_kinds

SHARES = {
    "cnn": {"convolution": 6, "relu": 6, "native_batch_norm": 6, "mm": 1},
    "transformer": {"mm": 12, "gelu": 3, "native_layer_norm": 4, "softmax": 2},
    "recurrent": {"sigmoid": 9, "tanh": 6, "mm": 8, "mul": 9},
}
NEW_SHARES = {"graph": {"index_select": 8, "index_add": 6, "mm": 3, "relu": 2}}


def programs(shares: dict[str, dict[str, int]], each: int, seed: int) -> list[Document]:
    """Programs of random size, whose operators are in the proportions of their kind."""
    rng = np.random.default_rng(seed)
    documents = []
    for kind, operators in shares.items():
        for number in range(each):
            layers = int(rng.integers(2, 20))
            counts = {o: layers * n + int(rng.integers(2)) for o, n in operators.items()}
            documents.append(Document(f"{kind}-{seed}-{number}", kind, counts))
    return documents


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("aten::add_", "add"),
        ("aten::cudnn_batch_norm_backward", "native_batch_norm_backward"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "fused_attention"),
        (
            "aten::_scaled_dot_product_efficient_attention_backward",
            "fused_attention_backward",
        ),
        ("aten::_softmax", "_softmax"),
        ("aten::empty_like", None),
        ("aten::_foreach_add_", None),
        ("ProfilerStep#3", None),
    ],
)
def test_an_operator_has_one_name_on_all_devices(name: str, operator: str | None) -> None:
    assert canonical_operator(name) == operator


def test_a_word_holds_the_size_of_the_result() -> None:
    assert word("mm", None) == "mm"
    assert [word("mm", n) for n in (1, 7, 8, 64, 512)] == ["mm 0", "mm 0", "mm 1", "mm 2", "mm 3"]
    assert Document("a", "", {"mm 1": 2, "mm 2": 3}).operators == {"mm": 5}


def test_documents_survive_a_file(tmp_path: Path) -> None:
    documents = programs(SHARES, 2, 0)
    file = tmp_path / "corpus.json.gz"
    write_documents(file, documents)
    assert read_documents(file) == documents
    first = file.read_bytes()
    write_documents(file, documents)
    assert file.read_bytes() == first


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not hold operator documents"),
        (b"text", "does not hold operator documents"),
        (gzip.compress(b'{"format": "other"}', mtime=0), "has the format 'other'"),
        (
            gzip.compress(
                b'{"format":"nostall operator documents 1","words":[],'
                b'"documents":[{"name":"a","kind":"b","counts":[[3,1]]}]}',
                mtime=0,  # names of tests must not depend on the time
            ),
            "does not hold operator documents",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "corpus.json.gz"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=message):
        read_documents(file)


def test_known_programs_get_their_kind_and_others_are_unknown() -> None:
    labeller = KindLabeller(programs(SHARES, 8, 0))
    known = programs(SHARES, 4, 1)
    labels = labeller.label(known)
    assert [label.kind for label in labels] == [d.kind for d in known]
    assert not any(label.is_unknown for label in labels)
    assert all(label.probability > 0.9 for label in labels)
    assert labels[0].nearest[0].kind == "cnn"
    assert labels[0].words[0][0] in SHARES["cnn"]
    assert all(label.is_unknown for label in labeller.label(programs(NEW_SHARES, 4, 1)))


@pytest.mark.slow
def test_programs_of_a_new_kind_are_one_group() -> None:
    labelled = programs({k: SHARES[k] for k in ("cnn", "recurrent")}, 8, 0)
    unknown = programs(NEW_SHARES, 6, 1)
    found = find_new_kinds(labelled, unknown)
    assert [set(kind.members) for kind in found.kinds] == [{d.name for d in unknown}]
    assert "index_add" in found.kinds[0].words
    assert all(sum(posterior.values()) == pytest.approx(1) for posterior in found.counts.values())


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "of 0 kinds"),
        (programs({"cnn": SHARES["cnn"]}, 3, 0), "of 1 kinds"),
        (programs(SHARES, 1, 0), "has one program"),
        ([*programs(SHARES, 2, 0), Document("a", "", {"mm": 1})], "a has no kind"),
        ([*programs(SHARES, 2, 0), Document("a", "cnn", {})], "a calls no operators"),
    ],
)
def test_programs_that_cannot_be_learnt_from_are_named(
    documents: list[Document], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        KindLabeller(documents)


def test_a_program_of_unknown_operators_only_is_refused() -> None:
    labeller = KindLabeller(programs(SHARES, 3, 0))
    with pytest.raises(BadInput, match="x calls no operator"):
        labeller.label([Document("x", "", {"fft_r2c": 3})])
