// Products of numbers of several words: the upper halves of products carry into sums (IMAD.HI), which
// libraries for cryptography have and those for deep learning hardly. FEW: only the kernels whose
// cubin is committed; the distances are mined from all.
#include <cstdint>

#define FIRST(OP, R, A, B) asm volatile("mad." OP ".cc.u32 %0,%1,%2,%0;" : "+r"(R) : "r"(A), "r"(B))
#define NEXT(OP, R, A, B) asm volatile("madc." OP ".cc.u32 %0,%1,%2,%0;" : "+r"(R) : "r"(A), "r"(B))
#define LAST(R) asm volatile("addc.u32 %0,%0,0;" : "+r"(R))

template <int N, int M>
__device__ void product(uint32_t* out, const uint32_t* left, const uint32_t* right, int stride) {
    uint32_t a[N], b[M], r[N + M + 2] = {0};
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = left[i * stride];
#pragma unroll
    for (int i = 0; i < M; ++i) b[i] = right[i * stride];
#pragma unroll
    for (int i = 0; i < M; ++i) {
        FIRST("lo", r[i], a[0], b[i]);
#pragma unroll
        for (int j = 1; j < N; ++j) NEXT("lo", r[i + j], a[j], b[i]);
        LAST(r[i + N]);
        FIRST("hi", r[i + 1], a[0], b[i]);
#pragma unroll
        for (int j = 1; j < N; ++j) NEXT("hi", r[i + j + 1], a[j], b[i]);
        LAST(r[i + N + 1]);
    }
#pragma unroll
    for (int i = 0; i < N + M; ++i) out[i * stride] = r[i];
}

#define PRODUCT(N, M)                                                                          \
    extern "C" __global__ void product_##N##_##M(uint32_t* o, const uint32_t* a,               \
                                                 const uint32_t* b, int stride) {              \
        product<N, M>(o + threadIdx.x, a + threadIdx.x, b, stride);                            \
    }
PRODUCT(8, 8)
#ifndef FEW
PRODUCT(3, 3) PRODUCT(4, 4) PRODUCT(4, 7) PRODUCT(5, 5) PRODUCT(6, 3) PRODUCT(6, 6) PRODUCT(7, 7)
PRODUCT(8, 4) PRODUCT(9, 2) PRODUCT(10, 10) PRODUCT(12, 12)
#endif
