"""PTX of the small kernels that make inputs and compare outputs where they lie.

Inputs follow from a key, the number of the sample and the position alone (the mixing function of
SplitMix64: Steele, Lea and Flood, OOPSLA 2014), so that any sample can be made again, and none
travels from the host.  The number lies in device memory: a CUDA graph that makes, runs and compares
samples then advances by itself.
"""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

_HEAD = """
.version 7.0
.target sm_75
.address_size 64
"""

_INDEX = """
 mov.u32 %r0, %ctaid.x;
 mov.u32 %r1, %ntid.x;
 mov.u32 %r2, %tid.x;
 mul.wide.u32 %d4, %r0, %r1;
 cvt.u64.u32 %d5, %r2;
 add.u64 %d4, %d4, %d5;
 mov.u32 %r3, %nctaid.x;
 mul.wide.u32 %d6, %r3, %r1;
"""
"""%d4: this thread's first element; %d6: the distance to its next one."""


def _mix(register: str) -> str:
    lines = []
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        lines += [f" shr.u64 %d11, {register}, {shift};", f" xor.b64 {register}, {register}, %d11;"]
        if factor is not None:
            lines += [f" mov.u64 %d11, {factor:#x};", f" mul.lo.u64 {register}, {register}, %d11;"]
    return "\n".join(lines)


_UNIFORM = """
 shr.u64 %d11, %d9, 40;
 cvt.u32.u64 %r4, %d11;
 cvt.rn.f32.u32 %f0, %r4;
 mul.rn.f32 %f0, %f0, 0f33800000;
 mul.rn.f32 %f0, %f0, %f2;
 add.rn.f32 %f0, %f0, %f1;
"""
"""%f0: low + span * u, with u a multiple of 2**-24 in [0, 1)."""

_BOUNDED = " mul.hi.u64 %d9, %d9, %d3;\n"

_MADE = {
    "f16": (2, _UNIFORM + " cvt.rn.f16.f32 %h0, %f0;\n st.global.b16 [%d8], %h0;"),
    "bf16": (
        2,
        _UNIFORM + " mov.b32 %r4, %f0;\n shr.u32 %r4, %r4, 16;\n cvt.u16.u32 %h0, %r4;\n"
        " st.global.b16 [%d8], %h0;",
    ),
    "f32": (4, _UNIFORM + " st.global.f32 [%d8], %f0;"),
    "f64": (8, _UNIFORM + " cvt.f64.f32 %e0, %f0;\n st.global.f64 [%d8], %e0;"),
    # Conversions to fp8 need sm_89.  Cut after conversion to f16: e5m2 is its upper byte; e4m3 its
    # upper bits at 2**-8 of the value (biases 15 and 7), at most 448.
    "f8e5m2": (
        1,
        _UNIFORM + " cvt.rn.f16.f32 %h0, %f0;\n shr.u16 %h0, %h0, 8;\n st.global.u8 [%d8], %h0;",
    ),
    "f8e4m3": (
        1,
        _UNIFORM + " mul.rn.f32 %f0, %f0, 0f3B800000;\n cvt.rn.f16.f32 %h0, %f0;\n"
        " cvt.u32.u16 %r4, %h0;\n and.b32 %r5, %r4, 0x7fff;\n shr.u32 %r5, %r5, 7;\n"
        " min.u32 %r5, %r5, 0x7e;\n and.b32 %r4, %r4, 0x8000;\n shr.u32 %r4, %r4, 8;\n"
        " or.b32 %r4, %r4, %r5;\n cvt.u16.u32 %h0, %r4;\n st.global.u8 [%d8], %h0;",
    ),
}
for _sign in "iu":
    _MADE[f"{_sign}64"] = (8, _BOUNDED + " st.global.u64 [%d8], %d9;")
    _MADE[f"{_sign}32"] = (4, _BOUNDED + " cvt.u32.u64 %r4, %d9;\n st.global.u32 [%d8], %r4;")
    _MADE[f"{_sign}16"] = (2, _BOUNDED + " cvt.u16.u64 %h0, %d9;\n st.global.u16 [%d8], %h0;")
    _MADE[f"{_sign}8"] = (1, _BOUNDED + " cvt.u16.u64 %h0, %d9;\n st.global.u8 [%d8], %h0;")


def fill(dtype: str) -> bytes:
    """``fill(out, n, number, key, low, span, bound)``: n values of ``dtype`` from sample
    ``*number``; floats in [low, low + span), integers in [0, bound)."""
    width, store = _MADE[dtype]
    return _ptx(f"""
.visible .entry fill(.param .u64 out, .param .u64 n, .param .u64 number, .param .u64 key,
 .param .f32 low, .param .f32 span, .param .u64 bound)
{{
 .reg .pred %p<4>;
 .reg .b16 %h<2>;
 .reg .b32 %r<8>;
 .reg .b64 %d<14>;
 .reg .f32 %f<4>;
 .reg .f64 %e<4>;
 ld.param.u64 %d0, [out];
 ld.param.u64 %d1, [n];
 ld.param.u64 %d2, [number];
 ld.param.u64 %d7, [key];
 ld.param.f32 %f1, [low];
 ld.param.f32 %f2, [span];
 ld.param.u64 %d3, [bound];
{_INDEX}
 mov.u64 %d12, {GOLDEN:#x};
 ld.global.u64 %d10, [%d2];
 mul.lo.u64 %d10, %d10, %d12;
 add.u64 %d10, %d10, %d7;
{_mix("%d10")}
LOOP:
 setp.ge.u64 %p0, %d4, %d1;
 @%p0 bra DONE;
 mul.lo.u64 %d9, %d4, %d12;
 add.u64 %d9, %d9, %d10;
{_mix("%d9")}
 mul.lo.u64 %d8, %d4, {width};
 add.u64 %d8, %d8, %d0;
{store}
 add.u64 %d4, %d4, %d6;
 bra LOOP;
DONE:
 ret;
}}
""")


_COMPARED = """
.visible .entry differing(.param .u64 got, .param .u64 expected, .param .u64 n,
 .param .u64 count, .param .f64 rtol, .param .f64 atol)
{{
 .reg .pred %p<4>;
 .reg .b16 %h<2>;
 .reg .b32 %r<8>;
 .reg .b64 %d<14>;
 .reg .f32 %f<4>;
 .reg .f64 %e<8>;
 ld.param.u64 %d0, [got];
 ld.param.u64 %d1, [expected];
 ld.param.u64 %d2, [n];
 ld.param.u64 %d3, [count];
 ld.param.f64 %e4, [rtol];
 ld.param.f64 %e5, [atol];
{index}
LOOP:
 setp.ge.u64 %p0, %d4, %d2;
 @%p0 bra DONE;
 mul.lo.u64 %d7, %d4, {width};
 add.u64 %d8, %d0, %d7;
 add.u64 %d9, %d1, %d7;
 add.u64 %d4, %d4, %d6;
{judge}
 mov.u64 %d7, 1;
 red.global.add.u64 [%d3], %d7;
 bra LOOP;
DONE:
 ret;
}}
"""
"""``judge`` jumps back to LOOP for elements that agree."""

_BITS = """
 ld.global.u32 %r4, [%d8];
 ld.global.u32 %r5, [%d9];
 setp.eq.u32 %p1, %r4, %r5;
 @%p1 bra LOOP;
"""
_NEAR = """
 setp.eq.f64 %p1, %e0, %e1;
 @%p1 bra LOOP;
 sub.rn.f64 %e2, %e0, %e1;
 abs.f64 %e2, %e2;
 abs.f64 %e3, %e1;
 mul.rn.f64 %e3, %e3, %e4;
 add.rn.f64 %e3, %e3, %e5;
 setp.gt.f64 %p2, %e2, 0d7FEFFFFFFFFFFFFF;
 @%p2 bra WRONG;
 setp.le.f64 %p1, %e2, %e3;
 @%p1 bra LOOP;
WRONG:
"""
"""A difference that is infinite or no number is never within a tolerance."""


def _from_e4m3(half: str, double: str) -> str:
    """The e4m3 value in the low byte of ``half`` as a double: through f16 at 2**-8 of it."""
    return f"""
 cvt.u32.u16 %r4, {half};
 and.b32 %r5, %r4, 0x7f;
 setp.eq.u32 %p2, %r5, 0x7f;
 shl.b32 %r5, %r5, 7;
 @%p2 mov.u32 %r5, 0x7e00;
 and.b32 %r4, %r4, 0x80;
 shl.b32 %r4, %r4, 8;
 or.b32 %r4, %r4, %r5;
 cvt.u16.u32 {half}, %r4;
 cvt.f64.f16 {double}, {half};
 mul.rn.f64 {double}, {double}, 0d4070000000000000;
"""


_BYTES = (
    " ld.global.u8 %h0, [%d8];\n ld.global.u8 %h1, [%d9];\n"
    " setp.eq.u16 %p1, %h0, %h1;\n @%p1 bra LOOP;\n"
)

_LOADED = {
    "f8e5m2": (
        1,
        _BYTES + " shl.b16 %h0, %h0, 8;\n shl.b16 %h1, %h1, 8;\n"
        " cvt.f64.f16 %e0, %h0;\n cvt.f64.f16 %e1, %h1;",
    ),
    "f8e4m3": (1, _BYTES + _from_e4m3("%h0", "%e0") + _from_e4m3("%h1", "%e1")),
    "f16": (
        2,
        " ld.global.b16 %h0, [%d8];\n ld.global.b16 %h1, [%d9];\n"
        " setp.eq.b16 %p1, %h0, %h1;\n @%p1 bra LOOP;\n"
        " cvt.f64.f16 %e0, %h0;\n cvt.f64.f16 %e1, %h1;",
    ),
    "bf16": (
        2,
        " ld.global.u16 %h0, [%d8];\n ld.global.u16 %h1, [%d9];\n"
        " setp.eq.b16 %p1, %h0, %h1;\n @%p1 bra LOOP;\n"
        " cvt.u32.u16 %r4, %h0;\n cvt.u32.u16 %r5, %h1;\n"
        " shl.b32 %r4, %r4, 16;\n shl.b32 %r5, %r5, 16;\n"
        " mov.b32 %f0, %r4;\n mov.b32 %f3, %r5;\n"
        " cvt.f64.f32 %e0, %f0;\n cvt.f64.f32 %e1, %f3;",
    ),
    "f32": (
        4,
        _BITS + " mov.b32 %f0, %r4;\n mov.b32 %f3, %r5;\n"
        " cvt.f64.f32 %e0, %f0;\n cvt.f64.f32 %e1, %f3;",
    ),
    "f64": (
        8,
        " ld.global.u64 %d10, [%d8];\n ld.global.u64 %d11, [%d9];\n"
        " setp.eq.b64 %p1, %d10, %d11;\n @%p1 bra LOOP;\n"
        " mov.b64 %e0, %d10;\n mov.b64 %e1, %d11;",
    ),
}
FLOATING = frozenset(_LOADED)


def differing() -> bytes:
    """Adds to ``*count`` how many of n 32-bit words differ between ``got`` and ``expected``."""
    return _ptx(_COMPARED.format(index=_INDEX, width=4, judge=_BITS))


def differing_beyond(dtype: str) -> bytes:
    """The same for n elements of a floating-point type, where a difference of at most
    ``atol + rtol * |expected|`` counts as none."""
    width, load = _LOADED[dtype]
    return _ptx(_COMPARED.format(index=_INDEX, width=width, judge=load + _NEAR))


def advance() -> bytes:
    """Adds 1 to ``*number``; for one thread."""
    return _ptx("""
.visible .entry advance(.param .u64 number)
{
 .reg .b64 %d<2>;
 ld.param.u64 %d0, [number];
 ld.global.u64 %d1, [%d0];
 add.u64 %d1, %d1, 1;
 st.global.u64 [%d0], %d1;
 ret;
}
""")


def _ptx(body: str) -> bytes:
    return (_HEAD + body + "\0").encode()
