"""Labels of files and shortened names: printable, short, and never equal for different things."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nostall.core.text.labels import file_labels, kernel_labels, printable, shorten_all


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    paths = [Path("runs/a/trace.json"), Path("runs/b/trace.json"), Path("runs/b/other.json")]
    assert file_labels(paths) == ["a/trace.json", "b/trace.json", "other.json"]
    assert file_labels([Path("/t.json"), Path("/a/t.json")]) == ["//t.json", "a/t.json"]


def test_names_that_are_not_utf8_can_be_printed() -> None:
    paths = [Path(os.fsdecode(name)) for name in (b"t\xff.json", b"t\xfe.json")]
    assert file_labels(paths) == [r"t\xff.json", r"t\xfe.json"]
    assert printable("a\x1b[2Jb\n") == r"a\x1b[2Jb\n"


def test_shortened_names_show_where_they_differ() -> None:
    names = ["epoch_1_rank_0_of_the_first_job.json", "epoch_1_rank_7_of_the_first_job.json"]
    assert shorten_all(names, 18) == ["…ank_0_of_the_fir…", "…ank_7_of_the_fir…"]
    assert shorten_all(["short", "a" * 30], 18) == ["short", "aaaaaaaaa…aaaaaaaa"]


def test_long_names_keep_both_ends() -> None:
    name = "h100_Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz, GPU 0"
    same, short = shorten_all(["rank 3, GPU 0", name], 25)
    assert same == "rank 3, GPU 0"
    assert len(short) == 25
    assert short.startswith("h100_Qwen") and short.endswith("GPU 0")


@given(st.text(st.characters(codec="ascii"), min_size=1, max_size=60), st.integers(3, 40))
def test_a_shortened_name_has_equal_parts_of_both_ends(name: str, length: int) -> None:
    (short,) = shorten_all([name], length)
    if len(name) <= length:
        assert short == name
        return
    head, _, tail = short.partition("…")
    assert len(short) == length and 0 <= len(head) - len(tail) <= 1
    assert name.startswith(head) and name.endswith(tail)


@given(st.lists(st.text("ab", min_size=1, max_size=30), max_size=12), st.integers(8, 20))
def test_different_names_stay_different(names: list[str], length: int) -> None:
    short = shorten_all(names, length)
    assert all(len(label) <= length for label in short)
    assert len(set(short)) == len(set(names))
    assert all(
        (first == second) == (a == b)
        for first, a in zip(short, names, strict=True)
        for second, b in zip(short, names, strict=True)
    )


ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::{}, "
    "std::array<char*, 3ul> >(int)"
)


def test_kernels_of_one_template_show_the_argument_that_differs() -> None:
    functors = ["CUDAFunctor_add<c10::BFloat16>", "BinaryFunctor<float, float, float>"]
    names = [*(ELEMENTWISE.format(functor) for functor in functors), "ampere_sgemm_128x64_tn" * 3]
    add, binary, product = kernel_labels(names, 40)
    assert add.startswith("vectorized…<8, CUDAFunctor_add<BF")
    assert binary.startswith("vectorized…<8, BinaryFunctor<flo")
    assert product.startswith("ampere_sgemm") and product.endswith("128x64_tn")
    assert {len(add), len(binary), len(product)} == {40}


@given(st.lists(st.text("a<,>", min_size=1, max_size=30), max_size=12), st.integers(8, 20))
def test_different_kernels_stay_different(names: list[str], length: int) -> None:
    labels = kernel_labels(names, length)
    assert all(len(label) <= length for label in labels)
    assert len(set(labels)) == len(set(names))
