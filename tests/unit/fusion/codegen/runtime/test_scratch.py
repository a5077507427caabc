"""Scratch memory of kernels with tensor descriptors."""

from __future__ import annotations

import threading
from contextvars import copy_context

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from triton.runtime import _allocation  # noqa: E402

from nostall.fusion.codegen.runtime import kernel  # noqa: E402


def test_an_allocator_is_set_where_there_is_none() -> None:
    found: list[object] = []

    def in_thread() -> None:
        kernel.provide_scratch()
        found.append(_allocation._allocator.get())

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert found == [kernel._allocate_scratch]


def test_an_allocator_of_the_program_stays() -> None:
    def own(size: int, alignment: int, stream: int | None) -> object:
        raise AssertionError("nothing is launched")

    def in_context() -> None:
        triton.set_allocator(own)
        kernel.provide_scratch()
        assert _allocation._allocator.get() is own

    copy_context().run(in_context)
