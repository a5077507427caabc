"""Recording of the kernels that are called."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from nostall.attach.torch_compile.runtime.custom_op import record_call, record_calls


def test_recordings_may_be_nested() -> None:
    with record_calls() as outer:
        with record_calls() as inner:
            pass
        record_call("kernel")
    assert (outer, inner) == ({"kernel"}, set())
