// Predicates of packed half-precision comparisons that feed the next comparison, a move or a branch.

#include <cuda_fp16.h>

#define CHAIN(name, compare, joined)                                                   \
    extern "C" __global__ void name(int *out, const __half2 *in, int count) {          \
        int k = blockIdx.x * blockDim.x + threadIdx.x;                                 \
        if (k >= count) return;                                                        \
        __half2 limit = __float2half2_rn(-65504.0f);                                   \
        __half2 a = in[4 * k], b = in[4 * k + 1], c = in[4 * k + 2], d = in[4 * k + 3]; \
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

extern "C" __global__ void pairs_equal(int *out, const __half2 *in, int count) {
    int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    __half2 a = in[3 * k], b = in[3 * k + 1], c = in[3 * k + 2];
    bool found = __hbeq2(a, b) | __hbeq2(b, c) | __hbgt2(a, c);
    if (found) out[k] = k;
}
