// Predicates of half-precision comparisons that feed the next comparison, a move or a branch.  One
// load brings all operands, so that no comparison waits for another one.

#include <cuda_fp16.h>

#define CHAIN(name, compare, joined)                                                   \
    extern "C" __global__ void name(int *out, const uint4 *in, int count) {            \
        int k = blockIdx.x * blockDim.x + threadIdx.x;                                 \
        if (k >= count) return;                                                        \
        __half2 limit = __float2half2_rn(-65504.0f);                                   \
        uint4 four = in[k];                                                            \
        __half2 a = *(__half2 *)&four.x, b = *(__half2 *)&four.y;                      \
        __half2 c = *(__half2 *)&four.z, d = *(__half2 *)&four.w;                      \
        bool found = compare(__low2half(a), __low2half(limit)) joined                  \
                     compare(__high2half(b), __high2half(limit)) joined                \
                     compare(__low2half(c), __high2half(b)) joined                     \
                     compare(__low2half(d), __low2half(a));                            \
        out[k] = found ? k : -1;                                                       \
    }

CHAIN(any_equal, __heq, |)
CHAIN(all_equal, __heq, &)
CHAIN(any_less, __hlt, |)
CHAIN(all_greater, __hgt, &)

extern "C" __global__ void pairs_equal(int *out, const uint4 *in, int count) {
    int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    uint4 four = in[k];
    __half2 a = *(__half2 *)&four.x, b = *(__half2 *)&four.y, c = *(__half2 *)&four.z;
    bool found = __hbeq2(a, b) | __hbeq2(b, c) | __hbgt2(a, c);
    if (found) out[k] = k;
}

// Chains of comparisons: the predicate of one is the only input of the next that is late.
#define LONG_CHAIN(name, compare, joined)                                              \
    extern "C" __global__ void name(int *out, const uint4 *in, float bound, int count) { \
        int k = blockIdx.x * blockDim.x + threadIdx.x;                                 \
        if (k >= count) return;                                                        \
        __half limit = __float2half(bound);                                            \
        uint4 four = in[k];                                                            \
        __half *v = (__half *)&four;                                                   \
        bool found = compare(v[0], limit);                                             \
        _Pragma("unroll") for (int i = 1; i < 8; ++i) found = found joined compare(v[i], limit); \
        out[k] = found;                                                                \
    }

LONG_CHAIN(long_any_equal, __heq, |)
LONG_CHAIN(long_all_equal, __heq, &)
LONG_CHAIN(long_any_unequal, __hne, |)
LONG_CHAIN(long_any_less, __hlt, |)
LONG_CHAIN(long_all_less, __hlt, &)
LONG_CHAIN(long_any_greater, __hgt, |)
LONG_CHAIN(long_all_greater, __hge, &)
LONG_CHAIN(long_odd_equal, __heq, ^)
