"""Waits and triggers of dependent launches that a candidate may insert."""

from __future__ import annotations

import pytest

from nostall.ptx.safety.validate import validate
from tests.unit.ptx.safety.texts import compare, kernel, kinds

_LOADS = "ld.param.u64 %rd1, [a];\ncvta.to.global.u64 %rd2, %rd1;\n{}ld.global.b32 %r1, [%rd2];\n"
_WAIT_FIRST = "griddepcontrol.wait;\n"
_TRIGGER = "griddepcontrol.launch_dependents;\n"


def test_a_wait_before_all_accesses_may_be_inserted() -> None:
    original = _LOADS.format("")
    for inserted in (_WAIT_FIRST, _WAIT_FIRST + _TRIGGER, _TRIGGER + _WAIT_FIRST):
        verdict = compare(original, _LOADS.format(inserted), dependents_wait=True)
        assert verdict.accepted
        assert "waits for the kernels before it" in verdict.differences[0]
        assert len(verdict.differences) == inserted.count(";")
    for wrong in (
        original + _WAIT_FIRST,
        _LOADS.format(_TRIGGER),
        _LOADS.format("@%p1 " + _WAIT_FIRST),
        _LOADS.format(2 * _WAIT_FIRST),
        _WAIT_FIRST + _LOADS.format("mov.b32 %r9, 1;"),
        _LOADS.format("@%p1 bra L;\n" + _WAIT_FIRST + "L:\n"),
    ):
        assert not compare(original, wrong, dependents_wait=True).accepted, wrong


def test_a_trigger_needs_dependents_that_wait() -> None:
    original = _LOADS.format("") + "st.global.b32 [%rd2], %r1;\n"
    waiting = _LOADS.format(_WAIT_FIRST) + "st.global.b32 [%rd2], %r1;\n"
    for early in (waiting.replace(_WAIT_FIRST, _WAIT_FIRST + _TRIGGER), _TRIGGER + waiting):
        refused = compare(original, early)
        assert kinds(refused) == {"dependent-launch"}
        assert "state that each of them waits" in refused.findings[0].reason
        assert compare(original, early, dependents_wait=True).accepted
    assert not compare(original, waiting + _TRIGGER).accepted
    assert compare(original, waiting).accepted


@pytest.mark.parametrize("access", [
    "ld.b32 %r1, [%rd1];", "ld.global.nc.b32 %r1, [%rd1];", "ld.const.b32 %r1, [%rd1];",
    "tex.1d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [%rd1, {%r2}];", "bar.sync 0;", "new.thing %r1;",
    "prefetch.global.L2 [%rd1];", "{ st.shared.b32 [buffer], %r1; }", "mov.u32 %r1, %clock;",
])  # fmt: skip
def test_no_access_stands_before_an_inserted_wait(access: str) -> None:
    original = f"add.s32 %r3, %r4, 1;\n{access}\nadd.s32 %r5, %r6, 1;\n"
    verdict = compare(original, original + _WAIT_FIRST)
    assert kinds(verdict) == {"dependent-launch"}
    assert verdict.findings[0].text.rstrip("}").strip() in access
    assert compare(original, original.replace(access, _WAIT_FIRST + access)).accepted


def test_a_wait_of_the_original_is_not_moved() -> None:
    original = _LOADS.format(_WAIT_FIRST)
    assert compare(original, original).accepted
    assert not compare(original, _WAIT_FIRST + original).accepted
    assert not compare(original, _LOADS.format("")).accepted
    assert not compare(original, _LOADS.format("") + _WAIT_FIRST).accepted


def test_a_wait_may_be_inserted_beside_a_kernel_that_has_one() -> None:
    other = kernel("griddepcontrol.wait;").split("\n.visible", 1)[1].replace("entry k(", "entry l(")
    original, candidate = (
        kernel(_LOADS.format(wait)) + "\n.visible" + other for wait in ("", _WAIT_FIRST)
    )
    assert validate(original, candidate).accepted
    function = ".func f()\n{\ngriddepcontrol.wait;\nret;\n}"
    original, candidate = (kernel(_LOADS.format(w), function) for w in ("", _WAIT_FIRST))
    assert not validate(original, candidate).accepted


def test_a_device_function_gets_no_wait() -> None:
    function = ".func f()\n{{\n{}ret;\n}}"
    changed = kernel("", function.format("griddepcontrol.wait;\n"))
    assert not validate(kernel("", function.format("")), changed).accepted
