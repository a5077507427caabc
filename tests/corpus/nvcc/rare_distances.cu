// Pairs of fixed latency that libraries hardly have: results that MATCH compares, and UMOV before a load
// from constant memory. FEW: only the kernels whose cubin is committed; the distances are mined from all.

#define MATCH(NAME, T, EXPRESSION)                                                             \
    extern "C" __global__ void NAME(int* out, const T* in, T n) {                              \
        int t = threadIdx.x;                                                                   \
        T v = in[t];                                                                           \
        out[t] = __match_any_sync(~0u, EXPRESSION);                                            \
        out[t + 32] = __match_any_sync(~0u, (EXPRESSION) + n) + __match_any_sync(~0u, n);      \
        int all;                                                                               \
        out[t + 64] = __match_all_sync(~0u, v + (EXPRESSION), &all) + all;                     \
    }
MATCH(match_add, int, v + n) MATCH(match_move, int, n) MATCH(match_fma, float, v* n + 1.0f)
#ifndef FEW
MATCH(match_multiply, int, v* n + 3) MATCH(match_negate, int, -v)
MATCH(match_shift, int, (v << 3) + n) MATCH(match_logic, int, v ^ n)
MATCH(match_float, float, v* n)
MATCH(match_sum, float, v + n) MATCH(match_long, long long, v + n)
MATCH(match_long_move, long long, n) MATCH(match_product, long long, v* n)
#endif

#ifdef FEW
#define ITEMS 64
#else
#define ITEMS 4096
#endif
__constant__ int words[ITEMS];
__constant__ short halves[ITEMS / 4 - 1];
__constant__ float4 quads[ITEMS / 8];
struct Parameters {
    int a[64];
    long long b[32];
    float f[16];
};

template <int N>
__device__ int walk(const Parameters& p, int n) {
    int s = 0;
#pragma unroll 1
    for (int k = 0; k < N; ++k) {
        s += p.a[k] * n;
        n = p.a[k + N] ^ s;
    }
    return s;
}

#define WALK(N, M)                                                                             \
    extern "C" __global__ void walk_##N##_##M(int* o, __grid_constant__ const Parameters p, int n) { \
        o[0] = walk<N>(p, n) + walk<M>(p, o[1]) + walk<17>(p, 3);                              \
    }
WALK(5, 9)
#ifndef FEW
WALK(6, 11) WALK(7, 13)
#endif

#define NESTED(N, M)                                                                           \
    extern "C" __global__ void nested_##N##_##M(int* o, int n) {                               \
        int s = 0;                                                                             \
        _Pragma("unroll 1") for (int k = 0; k < N; ++k) {                                      \
            int q = words[k];                                                                  \
            _Pragma("unroll 1") for (int j = 0; j < M; ++j) s += words[j + q] * halves[j];     \
        }                                                                                      \
        o[threadIdx.x] = s + n;                                                                \
    }
NESTED(37, 11)
#ifndef FEW
NESTED(12, 7) NESTED(5, 33)
#endif

#define QUADS(N)                                                                               \
    extern "C" __global__ void quads_##N(float* o, int n) {                                    \
        float4 a = make_float4(0, 0, 0, 0);                                                    \
        for (int k = 0; k < n; k += N) {                                                       \
            float4 b = quads[k];                                                               \
            a.x += b.x * o[k], a.y += b.y, a.z *= b.z, a.w -= b.w;                             \
        }                                                                                      \
        o[threadIdx.x] = a.x + a.y + a.z + a.w;                                                \
    }
#ifndef FEW
QUADS(1) QUADS(2) QUADS(3)
#endif
