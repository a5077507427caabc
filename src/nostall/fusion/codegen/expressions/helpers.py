"""Triton source of helper functions that generated kernels call.

Triton and libdevice lack these functions, or have slower ones.
"""

from __future__ import annotations

_SOURCE = """
def _follow():  # begins while the kernel before ends, and waits for all of it; so may the next one
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

def _behind():  # begins while the kernel before ends, and waits for all of it
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()

def _release():  # the next kernel may begin; all that is read above has been asked for
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()

def _max(a, b):  # NaN wins, as in PyTorch; tl.max would drop it
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

def _min(a, b):  # NaN wins, as in PyTorch; tl.min would drop it
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

def _online(m, s, x):  # a maximum, which begins above -inf, and the sum of exp(x - maximum)
    below = tl.exp2(tl.abs(libdevice.sub_rn(x, m)) * -1.4426950408889634)
    s = tl.where(x > m, s * below + 1.0, s + below)
    return tl.maximum(m, x, propagate_nan=tl.PropagateNan.ALL), s

def _rescaled(s, m, highest):  # a sum of exp(x - m) as one of exp(x - highest); 0 where m is -inf
    return tl.where(s == 0.0, 0.0, s * libdevice.fast_expf(m - highest))

def _spread(q, s, x, n):  # a sum of (x - mean)^2 after an x; s sums n of them, that one included
    d = x - s * (1.0 / n)
    return q + d * d * (n / tl.maximum(n - 1.0, 1.0))

def _apart(q, s, n, mean):  # a sum of squared differences from its own mean as one from mean
    own = s / tl.maximum(n, 1.0)
    d = tl.where((own == mean) | (n == 0.0), 0.0, own - mean)  # both may be infinite
    return q + n * d * d

def _mul(a, b):
    return a * b

def _within(x):  # an int64 as int32; one of its ends where it lies beyond
    low = x.to(tl.int32)
    beyond = tl.where(x < 0, -2147483648, 2147483647)
    return tl.where(low.to(tl.int64) == x, low, beyond)

def _erf(x):  # x P(x^2) / Q(x^2), 6e-7 of the value at most; without branches, unlike libdevice's
    u = tl.minimum(x * x, 15.3664)
    p = 2.050081548077287e-06 * u + 0.00028488380485214293
    p = ((p * u + 0.003765659173950553) * u + 0.05274885147809982) * u
    p = (p + 0.1904074251651764) * u + 1.1283791065216064
    q = 3.809171175817028e-05 * u + 0.0011625459883362055
    q = ((q * u + 0.014969300478696823) * u + 0.11410950869321823) * u
    q = (q + 0.5020769238471985) * u + 1.0
    y = libdevice.fast_dividef(x * p, q)
    y = tl.maximum(y, -1.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(y, 1.0, propagate_nan=tl.PropagateNan.ALL)

def _erf_plus_1(x):  # 2 / (1 + exp(-x R(x^2))), off by 6e-7 at most; R > 0: nothing is clamped
    u = x * x
    r = (-4.58634133e-07 * u + 1.72706641e-05) * u - 0.000258853921
    r = ((r * u + 0.00180544099) * u + 0.000532022677) * u - 0.296518505
    return _reciprocal(0.5 + 0.5 * tl.exp2((r * u - 3.25581551) * x))

def _tanh(x):  # by exp, or near 0 by x P(x^2): off by 1e-6 of the value at most
    u = x * x
    p = (-0.04632163 * u + 0.13246644) * u - 0.33330484
    far = 1.0 - _reciprocal(0.5 + 0.5 * tl.exp2(x * 2.8853900817779268))
    return tl.where(tl.abs(x) < 0.45, (p * u + 1.0) * x, far)

def _tanh_plus_1(x):  # 2 / (1 + exp(-2 x)): no digit is lost where tanh is nearly -1
    return _reciprocal(0.5 + 0.5 * tl.exp2(x * -2.8853900817779268))

def _sigmoid(x):  # what is below 2**-126 is 0: the instructions are those without subnormals
    return _reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))

def _reciprocal(x):  # a single instruction, off by 1 unit in the last place; without subnormals
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )

def _rounded(x):  # to an int32, the nearest even one; NaN is 0
    return tl.inline_asm_elementwise(
        "cvt.rni.s32.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
    )

def _of_int32(x):
    return tl.inline_asm_elementwise(
        "cvt.rn.f32.s32 $0, $1;", "=f,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )

def _of_int64(x):
    return tl.inline_asm_elementwise(
        "cvt.rn.f32.s64 $0, $1;", "=f,l", [x], dtype=tl.float32, is_pure=True, pack=1
    )

def _random(seed, first, place):  # word place % 4 of counter first + place // 4, below 1
    word = _word(seed, first.to(tl.uint32) + place.to(tl.uint32) // 4, place & 1, place & 2)
    return word.to(tl.float32) * 2.3283062977608182e-10

def _half(seed, first, place):  # half place % 8 of counter first + place // 8, above other bits
    word = _word(seed, first.to(tl.uint32) + place.to(tl.uint32) // 8, place & 2, place & 4)
    return tl.where(place & 1 == 0, word << 16, word)

def _number_of(word):  # (h + 0.5) / 65536, h the upper half: of 2**23 + h, which is these bits
    wide = (word >> 16 | 0x4B000000).to(tl.float32, bitcast=True)
    return wide * 1.52587890625e-05 - 127.99999237060547

def _word(seed, counter, odd, last):  # Philox 4x32-10: word 0, or 1 where odd; of the last two
    key0, key1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    a = counter
    b, c, d = a * 0, a * 0, a * 0
    for _ in tl.static_range(10):
        left, right = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a = (right >> 32).to(tl.uint32) ^ b ^ key0
        c = (left >> 32).to(tl.uint32) ^ d ^ key1
        b, d = right.to(tl.uint32), left.to(tl.uint32)
        key0, key1 = key0 + 0x9E3779B9, key1 + 0xBB67AE85
    return tl.where(last == 0, tl.where(odd == 0, a, b), tl.where(odd == 0, c, d))
"""
HELPERS = {
    text.partition("(")[0].removeprefix("def "): f"@triton.jit\n{text}\n"
    for text in _SOURCE.strip().split("\n\n")
}
"""Source of each helper function by name.  A kernel's file contains only those it calls.

The polynomials are fitted by this project:

- ``_erf``: minimax of the relative error over |x| < 3.92, beyond which erf rounds to 1.
- ``_tanh`` near 0: minimax of the relative error over |x| < 0.45.
- ``_erf_plus_1``: minimax of the error of the sum over |x| < 4.2; R grows beyond that.

The error bounds of the last two, and of ``_tanh_plus_1`` (5e-7), assume relative errors of 2^-22
for ``ex2.approx`` and of 2^-23 for ``rcp.approx``.

``_word`` is Philox (Salmon et al., SC 2011); one multiplication gives both halves of a product.
Adjacent elements of a thread share the Philox rounds, because the compiler can prove that their
indices differ in the last bits only.  It proves that for ``//``, but not always for ``>>``.

``_online`` uses the subtraction and the exp of
:mod:`~nostall.fusion.codegen.expressions.softmax`.
"""


def used_helpers(text: str) -> list[str]:
    """Source of the helpers that a text calls, directly or through helpers, in table order."""
    used: set[str] = set()
    unscanned = [text]
    while unscanned:
        source = unscanned.pop()
        new = {name for name in HELPERS if f"{name}(" in source} - used
        unscanned += [HELPERS[name] for name in new]
        used |= new
    return [HELPERS[name] for name in HELPERS if name in used]
