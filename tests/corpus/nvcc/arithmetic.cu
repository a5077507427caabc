// Arithmetic of every type: fp64, half2, bf16, integers of 64 bits, special functions, conversions.
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

extern "C" __global__ void doubles(double *y, const double *x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    double v = x[i];
    y[i] = v / (v * v + 1.0) + sqrt(fabs(v)) + fma(v, v, 0.5) - floor(v) + fmin(v, 2.0);
    y[n + i] = exp(v) + (double)(float)v + (double)(long long)v + rsqrt(v + 3.0);
}

extern "C" __global__ void double_chain(double *y, const double *x)
{
    double a = x[threadIdx.x], b = a + 1.0, c = a - 1.0, d = a * 0.5;
#pragma unroll 16
    for (int k = 0; k < 64; ++k) {
        a = a * b + c;
        b = b * c + d;
        c = c * d + a;
        d = d * a + b;
    }
    y[threadIdx.x] = a + b + c + d;
}

extern "C" __global__ void halves(__half2 *y, const __half2 *x, __nv_bfloat162 *b, __half *h)
{
    int i = threadIdx.x;
    __half2 v = x[i], w = x[i + 1];
    v = __hfma2(v, w, __hadd2(v, w));
    v = __hmul2_sat(v, __hmax2(v, w));
    v = h2exp2(__hneg2(v)) + h2rcp(w) + h2sqrt(v);
    y[i] = __hgt2(v, w) + v;
#if __CUDA_ARCH__ >= 800
    __nv_bfloat162 c = b[i];
    c = __hfma2(c, c, __hmul2(c, b[i + 1]));
    b[i] = __hmin2(c, b[i + 2]);
#endif
    h[i] = __hdiv(h[i], __float2half_rn(3.0f)) + __low2half(v) + __short2half_rn(i);
}

extern "C" __global__ void conversions(void *y, const float *x, const int *n)
{
    int i = threadIdx.x;
    float v = x[i];
    ((__nv_fp8_e4m3 *)y)[i] = __nv_fp8_e4m3(v);
    ((__nv_fp8_e5m2 *)y)[i + 256] = __nv_fp8_e5m2(v * 2.0f);
    ((int8_t *)y)[i + 512] = (int8_t)__float2int_rn(v);
    ((uint16_t *)y)[i + 512] = (uint16_t)__float2uint_rz(v);
    ((long long *)y)[i + 256] = __float2ll_rd(v);
    ((float *)y)[i + 2048] = __ll2float_ru(n[i]) + __uint2float_rn(n[i]) + truncf(v) + rintf(v);
    ((float *)y)[i + 4096] = __half2float(__float2half_rz(v)) + __saturatef(v);
}

extern "C" __global__ void wide_integers(unsigned long long *y, const unsigned long long *x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long a = x[i], b = x[i + 1] | 1;
    y[i] = a / b + a % b + __umul64hi(a, b) + (a << (b & 63)) + (a >> 7) + __popcll(a) + __clzll(b);
    long long s = (long long)a;
    y[n + i] = s / 10 + s % 1000 + (s > 5 ? s * s : -s) + __brevll(a) + __ffsll(b);
}

extern "C" __global__ void small_integers(int *y, const int *x, const unsigned *u)
{
    int i = threadIdx.x, a = x[i], b = x[i + 1];
    unsigned c = u[i], d = u[i + 1] | 1;
    int r = a / 7 + a % 11 + c / d + c % d + __mulhi(a, b) + __umulhi(c, d) + __mul24(a, b);
    r += __sad(a, b, 3) + __usad(c, d, 1) + __funnelshift_l(c, d, a) + __funnelshift_rc(c, d, b);
    r += __vadd4(a, b) + __vmaxs2(a, b) + __vcmpgtu4(c, d) + __vabsdiffu4(c, d);
    r += __dp4a(a, b, r) + __dp2a_lo(a, b, r) + __byte_perm(a, b, c) + __popc(c) + __brev(d);
    r += (a & b | ~a & c) ^ d;
    r += min(a, max(b, r)) + abs(a) + (a < b ? 5 : b > 3 ? a : c);
    asm("bfe.u32 %0, %0, 3, 9; bfi.b32 %0, %0, %1, 5, 7;" : "+r"(r) : "r"(a));
    y[i] = r;
}

extern "C" __global__ void functions(float *y, const float *x)
{
    int i = threadIdx.x;
    float v = x[i];
    y[i] = sinf(v) + cosf(v) * tanf(v) + powf(fabsf(v), 1.3f) + erff(v) + logf(v) + expm1f(v);
    y[i + 256] = __sinf(v) + __cosf(v) + __expf(v) + __logf(v) + __fdividef(v, 3.0f) + rsqrtf(v);
    y[i + 512] = __frcp_rn(v) + __fsqrt_rn(v) + __fdiv_rn(v, 7.0f) + __fmaf_rz(v, v, v) + tgammaf(v);
    y[i + 768] = fmaxf(v, fminf(v, 2.0f)) + copysignf(v, -1.0f) + ldexpf(v, 3) + remainderf(v, 0.7f);
    y[i + 1024] = isnan(v) ? 1.0f : isinf(v) ? 2.0f : signbit(v) ? 3.0f : 4.0f;
}

extern "C" __global__ void carry_chain(uint32_t *y, const uint32_t *x)
{
    // 128-bit product and sum.
    const uint32_t *a = x + threadIdx.x * 8, *b = a + 4;
    uint32_t r[4] = {0, 0, 0, 0};
    asm("mul.lo.u32 %0, %4, %8;\n\t"
        "mul.hi.u32 %1, %4, %8;\n\t"
        "mad.lo.cc.u32 %1, %4, %9, %1;\n\t"
        "madc.hi.cc.u32 %2, %4, %9, 0;\n\t"
        "addc.u32 %3, 0, 0;\n\t"
        "mad.lo.cc.u32 %1, %5, %8, %1;\n\t"
        "madc.hi.cc.u32 %2, %5, %8, %2;\n\t"
        "madc.lo.u32 %3, %5, %9, %3;\n\t"
        "add.cc.u32 %0, %0, %6;\n\t"
        "addc.cc.u32 %1, %1, %7;\n\t"
        "addc.cc.u32 %2, %2, %10;\n\t"
        "addc.u32 %3, %3, %11;"
        : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]));
    ((uint4 *)y)[threadIdx.x] = make_uint4(r[0], r[1], r[2], r[3]);
}
