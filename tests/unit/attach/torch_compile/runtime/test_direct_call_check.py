"""A direct call is used only if it has the results and the changes of Triton's own launch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor  # noqa: E402

from nostall.attach.torch_compile.runtime.launcher import _Check  # noqa: E402


def check(changed: float = 3.0, result: float = 6.0) -> _Check:
    """A launch that has added 1 to a tensor, and returned its old value times the other input."""
    inputs = [torch.full((4,), changed), torch.full((4,), 3.0)]
    return _Check(inputs, [torch.full((4,), 2.0)], [torch.full((4,), result)])


def call(inputs: Sequence[Tensor]) -> list[Tensor]:
    result = inputs[0] * inputs[1]
    inputs[0].add_(1)
    return [result]


def test_a_call_runs_on_copies_of_what_the_kernel_changes() -> None:
    made = check()
    assert made.reproduces(call)
    assert made.reproduces(call)  # the copies are fresh: neither call has changed the inputs
    assert made.inputs[0].tolist() == [3.0] * 4


@pytest.mark.parametrize("wrong", [check(changed=4.0), check(result=7.0)])
def test_another_change_or_another_result_is_refused(wrong: _Check) -> None:
    assert not wrong.reproduces(call)
