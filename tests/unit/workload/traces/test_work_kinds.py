"""Kinds of work by the names of kernels and copies, against a classification by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.workload.traces.work_kinds import (
    WorkKind,
    is_host_to_device,
    kernel_work_kind,
    parse_kernel_name,
)
from tests.unit.workload.traces.kernels_by_kind import (
    COPIES_TO_THE_GPU,
    OTHER_COPIES,
    kernels_by_kind,
)

BY_KIND = kernels_by_kind()


def test_every_kind_has_names() -> None:
    assert {kind: len(names) > 30 for kind, names in BY_KIND.items()} == {
        WorkKind.COMPUTE: True,
        WorkKind.MEMORY: True,
        WorkKind.COMMUNICATION: True,
    }


@pytest.mark.parametrize("kind", BY_KIND)
def test_kinds_are_those_of_the_classification_by_hand(kind: WorkKind) -> None:
    others = {name: kernel_work_kind(name).name for name in BY_KIND[kind]}
    assert {n: k for n, k in others.items() if k != kind.name} == {}


def test_a_name_that_is_cut_off_behind_its_identifier_keeps_its_kind() -> None:
    """Viewers and reports shorten names; the identifier is at the start of most of them."""
    for kind, names in BY_KIND.items():
        for name in names:
            if "<" in name and not name.startswith(("void cutlass", "void ck_tile", "std::")):
                assert kernel_work_kind(name[: name.index("<") + 3]) is kind, name


@pytest.mark.parametrize(
    ("name", "function", "scope"),
    [
        ("void f<int>(int)", "f", ()),
        ("void a::(anonymous namespace)::RMSNormKernel<8u>(x)", "rms_norm_kernel", ("a",)),
        ("std::enable_if<true, void>::type n::g<2>(x)", "g", ("n",)),
        ("void cutlass::Kernel2<foo_gemm>(foo_gemm::Params)", "foo_gemm", ("cutlass",)),
        ("void ck_tile::kentry<256, 1, ck_tile::A<int> >(x)", "a", ("ck_tile", "ck_tile")),
        ("_ZN1n10kernelNameIfEEvPT_", "kernel_name", ("n",)),
        ("_ZN2ck12_GLOBAL__N_15inner", "inner", ("ck",)),
        ("_Z9vectorAddPKf", "vector_add", ()),
        ("_ZTSN2at6native3xpu5FunctE", "funct", ("at", "native", "xpu")),
        ("k.kd", "k", ()),
        ("", "", ()),
    ],
)
def test_identifiers(name: str, function: str, scope: tuple[str, ...]) -> None:
    parsed = parse_kernel_name(name)
    assert (parsed.function, parsed.scope) == (function, scope)


@given(st.text(st.sampled_from("abKernel_<>():, 0123NZI~*&{}") | st.characters(), max_size=60))
def test_any_text_has_a_kind(name: str) -> None:
    assert kernel_work_kind(name) in BY_KIND


def test_a_very_long_name_is_parsed_in_linear_time() -> None:
    assert kernel_work_kind("void a<" * 100_000) in BY_KIND
    assert kernel_work_kind("_ZN" + "1a" * 100_000) in BY_KIND


def test_copies_from_the_host() -> None:
    assert [name for name in COPIES_TO_THE_GPU if not is_host_to_device(name)] == []
    assert [name for name in OTHER_COPIES if is_host_to_device(name)] == []
