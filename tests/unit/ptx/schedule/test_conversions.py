"""Conversions of integers to f16 through f32: same values, a text that the validator proves."""

from __future__ import annotations

import numpy as np

from nostall.ptx.program.module import parse
from nostall.ptx.safety.validate import validate
from nostall.ptx.schedule.levers import Levers
from nostall.ptx.schedule.space import PtxSpace
from nostall.ptx.schedule.state import PtxState

PTX = """\
.version 8.0
.target sm_90
.address_size 64

.visible .entry dequant(
	.param .u64 dequant_param_0
)
{
	.reg .pred %p<2>;
	.reg .b16 %rs<5>;
	.reg .b32 %r<5>;
	.reg .b64 %rd<3>;
	ld.param.u64 %rd1, [dequant_param_0];
	ld.global.u32 %r1, [%rd1];
	and.b32 %r2, %r1, 15;
	cvt.rn.f16.s32 %rs1, %r2;
	cvt.rn.f16.u32 	%rs2 , %r1;
	setp.ne.s32 %p1, %r2, 0;
	@%p1 cvt.rn.f16.s32 %rs2, %r2;
	st.global.b16 [%rd1], %rs1;
	st.global.b16 [%rd1+2], %rs2;
	ret;
}
"""
STATE = PtxState(conversions="f32")


def by_f32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(np.float16)


def direct(values: np.ndarray) -> np.ndarray:
    """One rounding: f64 holds each integer of 32 bits."""
    with np.errstate(over="ignore"):
        return values.astype(np.float64).astype(np.float16)


def test_both_ways_round_once() -> None:
    """f32 holds what f16 can hold; beyond, both ways are monotone, so their ends are enough."""
    values = np.arange(-(2**17), 2**17 + 1, dtype=np.int64)
    assert np.array_equal(values.astype(np.float32).astype(np.int64), values)
    assert np.array_equal(by_f32(values), direct(values))
    ends = np.array([-(2**31), -(2**17), 2**17, 2**31 - 1, 2**32 - 1], dtype=np.int64)
    assert np.isinf(by_f32(ends)).all() and np.isinf(direct(ends)).all()


def test_the_validator_proves_the_text_and_refuses_others() -> None:
    space = PtxSpace(parse(PTX), "dequant", Levers(conversions=("", "f32")))
    assert space.levers.conversions == ("", "f32")
    assert space.load(space.dump(STATE)) == STATE
    text = space.text(STATE)
    signed = "{ .reg .f32 %nostall_f32; cvt.rn.f32.s32 %nostall_f32, %r2; "
    assert f"{signed}cvt.rn.f16.f32 %rs1, %nostall_f32; }}" in text
    assert "cvt.rn.f32.u32 %nostall_f32, %r1;" in text
    assert "@%p1 cvt.rn.f16.s32 %rs2, %r2;" in text  # guarded ones stay
    assert validate(PTX, text).accepted
    moved = space.reorder(STATE, np.random.default_rng(0), sigma=8)
    assert moved.orders and validate(PTX, space.text(moved)).accepted
    for old, new in (
        ("f32.s32 %nostall_f32, %r2", "f32.u32 %nostall_f32, %r2"),
        ("f32.s32 %nostall_f32, %r2", "f32.s32 %nostall_f32, %r1"),
        ("cvt.rn.f16.f32 %rs1,", "cvt.rn.f16.f32 %rs3,"),
        ("cvt.rn.f16.f32 %rs1,", "cvt.rz.f16.f32 %rs1,"),
        ("cvt.rn.f16.f32 %rs1,", "cvt.rn.bf16.f32 %rs1,"),
        ("cvt.rn.f32.s32", "cvt.rz.f32.s32"),
        (signed, signed + "st.global.u32 [%rd1+8], %r2; "),
    ):
        assert text.count(old) >= 1 and not validate(PTX, text.replace(old, new, 1)).accepted, new


def test_a_local_register_that_hides_an_operand_is_no_conversion() -> None:
    text = PTX.replace(
        "cvt.rn.f16.s32 %rs1, %r2;",
        "{ .reg .f32 %r2; cvt.rn.f32.s32 %r2, %r2; cvt.rn.f16.f32 %rs1, %r2; }",
        1,
    )
    assert not validate(PTX, text).accepted


def test_kernels_without_such_conversions_have_no_such_setting() -> None:
    plain = PTX.replace("cvt.rn.f16.s32 %rs1", "cvt.rn.f16.s16 %rs1").replace("f16.u32", "f16.u16")
    space = PtxSpace(parse(plain), "dequant", Levers(conversions=("", "f32")))
    assert space.levers.conversions == ("",)
