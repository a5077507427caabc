"""PTX of helper kernels that generate random inputs and compare outputs in device memory.

An input value is a function of a key, the sample's number and the element's position (the mixing
function of SplitMix64: Steele, Lea and Flood, OOPSLA 2014).  So any sample can be generated again,
and none is copied from the host.  The sample's number is in device memory, so a CUDA graph that
generates, runs and compares samples can advance it.
"""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15
"""Increment of SplitMix64's state: 2**64 divided by the golden ratio."""
_FIRST_FACTOR, _SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

_HEADER = """
.version 7.0
.target sm_75
.address_size 64
"""

_DEPENDENT_HEADER = """
.version 7.8
.target sm_90
.address_size 64
"""
"""For instructions of dependent launches."""

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
"""Sets %d4 to the thread's first element and %d6 to the stride of its grid-stride loop."""


def _mix(register: str) -> str:
    """SplitMix64's mixing function on a 64-bit register; uses %d11."""
    lines = []
    for shift, factor in ((30, _FIRST_FACTOR), (27, _SECOND_FACTOR), (31, None)):
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
"""Sets %f0 to low + span * u, where u is a multiple of 2**-24 in [0, 1)."""

_BOUNDED = " mul.hi.u64 %d9, %d9, %d3;\n"
"""Sets %d9 to an integer in [0, bound)."""

_STORES = {
    "f16": (2, _UNIFORM + " cvt.rn.f16.f32 %h0, %f0;\n st.global.b16 [%d8], %h0;"),
    "bf16": (
        2,
        _UNIFORM + " mov.b32 %r4, %f0;\n shr.u32 %r4, %r4, 16;\n cvt.u16.u32 %h0, %r4;\n"
        " st.global.b16 [%d8], %h0;",
    ),
    "f32": (4, _UNIFORM + " st.global.f32 [%d8], %f0;"),
    "f64": (8, _UNIFORM + " cvt.f64.f32 %e0, %f0;\n st.global.f64 [%d8], %e0;"),
    # PTX conversions to fp8 need sm_89, so fp8 values are truncated f16 values.  e5m2 is the upper
    # byte of the f16.  e4m3 takes the upper bits of the f16 of value * 2**-8 (because the exponent
    # biases are 15 and 7), at most 448.
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
"""Bytes of an element, and the PTX that generates and stores one, by dtype."""
for _sign in "iu":
    _STORES[f"{_sign}64"] = (8, _BOUNDED + " st.global.u64 [%d8], %d9;")
    _STORES[f"{_sign}32"] = (4, _BOUNDED + " cvt.u32.u64 %r4, %d9;\n st.global.u32 [%d8], %r4;")
    _STORES[f"{_sign}16"] = (2, _BOUNDED + " cvt.u16.u64 %h0, %d9;\n st.global.u16 [%d8], %h0;")
    _STORES[f"{_sign}8"] = (1, _BOUNDED + " cvt.u16.u64 %h0, %d9;\n st.global.u8 [%d8], %h0;")


def fill(dtype: str) -> bytes:
    """PTX of ``fill(out, n, number, key, low, span, bound)``, which generates ``n`` values.

    They are the values of sample ``*number``: floats in [low, low + span), integers in [0, bound).
    """
    width, store = _STORES[dtype]
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


_COMPARE = """
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
{compare}
 mov.u64 %d7, 1;
 red.global.add.u64 [%d3], %d7;
 bra LOOP;
DONE:
 ret;
}}
"""
"""Template of the comparison kernels; ``{compare}`` jumps to LOOP if two elements agree."""

_COMPARE_WORDS = """
 ld.global.u32 %r4, [%d8];
 ld.global.u32 %r5, [%d9];
 setp.eq.u32 %p1, %r4, %r5;
 @%p1 bra LOOP;
"""
_COMPARE_TOLERANCE = """
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
"""Compares the doubles %e0 and %e1.  An infinite or NaN difference exceeds every tolerance."""


def _from_e4m3(half: str, double: str) -> str:
    """PTX that converts the e4m3 value in the low byte of ``half`` to a double.

    The bits are moved into an f16, which then has 2**-8 of the value, and scaled up as a double.
    """
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


_COMPARE_BYTES = (
    " ld.global.u8 %h0, [%d8];\n ld.global.u8 %h1, [%d9];\n"
    " setp.eq.u16 %p1, %h0, %h1;\n @%p1 bra LOOP;\n"
)

_LOADS = {
    "f8e5m2": (
        1,
        _COMPARE_BYTES + " shl.b16 %h0, %h0, 8;\n shl.b16 %h1, %h1, 8;\n"
        " cvt.f64.f16 %e0, %h0;\n cvt.f64.f16 %e1, %h1;",
    ),
    "f8e4m3": (1, _COMPARE_BYTES + _from_e4m3("%h0", "%e0") + _from_e4m3("%h1", "%e1")),
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
        _COMPARE_WORDS + " mov.b32 %f0, %r4;\n mov.b32 %f3, %r5;\n"
        " cvt.f64.f32 %e0, %f0;\n cvt.f64.f32 %e1, %f3;",
    ),
    "f64": (
        8,
        " ld.global.u64 %d10, [%d8];\n ld.global.u64 %d11, [%d9];\n"
        " setp.eq.b64 %p1, %d10, %d11;\n @%p1 bra LOOP;\n"
        " mov.b64 %e0, %d10;\n mov.b64 %e1, %d11;",
    ),
}
"""Bytes of an element, and the PTX that loads two as doubles %e0 and %e1, by dtype.

The PTX jumps to LOOP if both have the same bits.
"""
FLOAT_DTYPES = frozenset(_LOADS)


def differing() -> bytes:
    """PTX of ``differing(got, expected, n, count, ...)``, which compares n 32-bit words.

    It adds the number of words that differ to ``*count``.
    """
    return _ptx(_COMPARE.format(index=_INDEX, width=4, compare=_COMPARE_WORDS))


def differing_beyond(dtype: str) -> bytes:
    """PTX of ``differing(got, expected, n, count, rtol, atol)`` for n floating-point elements.

    It adds the number of elements whose difference exceeds ``atol + rtol * |expected|`` to
    ``*count``.
    """
    width, load = _LOADS[dtype]
    compare = load + _COMPARE_TOLERANCE
    return _ptx(_COMPARE.format(index=_INDEX, width=width, compare=compare))


def advance() -> bytes:
    """PTX of ``advance(number)``, which adds 1 to ``*number``; launched with one thread."""
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


def late_copy() -> bytes:
    """PTX of ``late_copy(out, in, n, delay)``, which copies n 32-bit words after ``delay`` ns.

    It lets kernels that are launched as its dependents start at once.
    """
    return _ptx(
        f"""
.visible .entry late_copy(.param .u64 out, .param .u64 in, .param .u64 n, .param .u64 delay)
{{
 .reg .pred %p<4>;
 .reg .b32 %r<8>;
 .reg .b64 %d<14>;
 griddepcontrol.launch_dependents;
 ld.param.u64 %d0, [out];
 ld.param.u64 %d1, [in];
 ld.param.u64 %d2, [n];
 ld.param.u64 %d3, [delay];
{_INDEX}
 mov.u64 %d7, %globaltimer;
LATER:
 mov.u64 %d8, %globaltimer;
 sub.u64 %d8, %d8, %d7;
 setp.le.u64 %p0, %d8, %d3;
 @%p0 bra LATER;
LOOP:
 setp.ge.u64 %p0, %d4, %d2;
 @%p0 bra DONE;
 mul.lo.u64 %d9, %d4, 4;
 add.u64 %d10, %d1, %d9;
 add.u64 %d11, %d0, %d9;
 ld.global.u32 %r4, [%d10];
 st.global.u32 [%d11], %r4;
 add.u64 %d4, %d4, %d6;
 bra LOOP;
DONE:
 ret;
}}
""",
        _DEPENDENT_HEADER,
    )


def _ptx(body: str, header: str = _HEADER) -> bytes:
    return (header + body + "\0").encode()
