// Warpgroup products whose first operand is computed in registers just before.
// FEW: only the kernels whose cubin is committed; the distances are mined from all.

#include <cstdint>
#include <cuda_fp16.h>

#if __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 1, 1, "
        "1, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void multiply(float (&d)[8], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, "
        "{%8,%9,%10,%11}, %12, 1, 1, 1, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ float real(uint32_t x) { return __uint_as_float(x); }
__device__ __forceinline__ uint32_t bits(float x) { return __float_as_uint(x); }

#define PRODUCTS(NAME, N, WAITED, EXPRESSION)                                                  \
    extern "C" __global__ void __launch_bounds__(128)                                          \
        NAME##_##N##_##WAITED(float* out, const uint32_t* in, uint64_t db, int n) {            \
        float d[N] = {}, e[N] = {};                                                            \
        uint32_t a[4], b[4];                                                                   \
        for (int k = 0; k < 4; ++k) a[k] = in[threadIdx.x + 128 * k], b[k] = a[k] + 5;         \
        for (int k = 0; k < n; ++k) {                                                          \
            multiply(d, a, db);                                                                \
            asm volatile("wgmma.wait_group.sync.aligned " #WAITED ";" ::: "memory");           \
            for (int q = 0; q < 4; ++q) {                                                      \
                uint32_t x = in[k * 8 + q + threadIdx.x], v = b[q];                            \
                b[q] = EXPRESSION;                                                             \
            }                                                                                  \
            multiply(e, b, db + 64);                                                           \
            asm volatile("wgmma.wait_group.sync.aligned " #WAITED ";" ::: "memory");           \
            for (int q = 0; q < 4; ++q) {                                                      \
                uint32_t x = in[k * 8 + 4 + q + threadIdx.x], v = a[q];                        \
                a[q] = EXPRESSION;                                                             \
            }                                                                                  \
            db += 32;                                                                          \
        }                                                                                      \
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");                         \
        for (int k = 0; k < N; ++k) out[threadIdx.x * N + k] = d[k] + e[k];                    \
    }
#define ALL(NAME, EXPRESSION)                                                                  \
    PRODUCTS(NAME, 4, 0, EXPRESSION)                                                           \
    PRODUCTS(NAME, 4, 1, EXPRESSION)                                                           \
    PRODUCTS(NAME, 8, 0, EXPRESSION)                                                           \
    PRODUCTS(NAME, 8, 1, EXPRESSION)

PRODUCTS(multiply_add, 4, 1, x* 3u + v)
PRODUCTS(logic, 4, 1, v ^ x)
PRODUCTS(select, 4, 0, x > 5 ? v : x)
PRODUCTS(float_fma, 8, 1, bits(fmaf(real(x), 1.5f, real(v))))
#ifndef FEW
PRODUCTS(multiply_add, 4, 0, x* 3u + v)
PRODUCTS(multiply_add, 8, 0, x* 3u + v)
PRODUCTS(multiply_add, 8, 1, x* 3u + v)
PRODUCTS(logic, 4, 0, v ^ x)
PRODUCTS(logic, 8, 0, v ^ x)
PRODUCTS(logic, 8, 1, v ^ x)
PRODUCTS(select, 4, 1, x > 5 ? v : x)
PRODUCTS(select, 8, 0, x > 5 ? v : x)
PRODUCTS(select, 8, 1, x > 5 ? v : x)
PRODUCTS(float_fma, 4, 0, bits(fmaf(real(x), 1.5f, real(v))))
PRODUCTS(float_fma, 4, 1, bits(fmaf(real(x), 1.5f, real(v))))
PRODUCTS(float_fma, 8, 0, bits(fmaf(real(x), 1.5f, real(v))))
ALL(add, v + x)
ALL(add_constant, v + 12345u)
ALL(shift_add, v * 8u + x)
ALL(shift, __funnelshift_l(v, x, 7))
ALL(bytes, __byte_perm(v, x, 0x5410))
ALL(larger, max(v, x))
ALL(float_add, bits(real(x) + real(v)))
ALL(float_multiply, bits(real(x) * real(v)))
#endif
#endif
