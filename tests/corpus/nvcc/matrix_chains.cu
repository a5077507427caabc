// Chains of matrix products of one warp: few independent accumulators, operands from memory.
#include <cstdint>

__device__ __forceinline__ void product(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
}

__device__ __forceinline__ void product(uint32_t (&d)[2], uint32_t a0, uint32_t a1, uint32_t b)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3}, {%4}, {%0,%1};"
                 : "+r"(d[0]), "+r"(d[1]) : "r"(a0), "r"(a1), "r"(b));
}

template <typename Value, int WORDS, int COUNT>
__device__ __forceinline__ void chains(Value *y, const uint4 *x)
{
    Value d[COUNT][WORDS];
    for (int j = 0; j < COUNT; ++j)
        for (int w = 0; w < WORDS; ++w) d[j][w] = Value(0);
    uint4 a = x[threadIdx.x], b = x[threadIdx.x + 32], c = x[threadIdx.x + 64];
    uint32_t left[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, right[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int j = 0; j < COUNT; ++j) product(d[j], left[2 * k], left[2 * k + 1], right[(k + j) % 4]);
    for (int j = 0; j < COUNT; ++j)
        for (int w = 0; w < WORDS; ++w) y[(threadIdx.x * COUNT + j) * WORDS + w] = d[j][w];
}

#define CHAINS(count)                                                                  \
    extern "C" __global__ void float_chains_##count(float *y, const uint4 *x)          \
    { chains<float, 4, count>(y, x); }                                                 \
    extern "C" __global__ void half_chains_##count(uint32_t *y, const uint4 *x)        \
    { chains<uint32_t, 2, count>(y, x); }

CHAINS(1)
CHAINS(2)
CHAINS(3)
CHAINS(4)
CHAINS(5)
CHAINS(6)
CHAINS(8)
