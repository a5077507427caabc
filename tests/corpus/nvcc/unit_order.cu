// Results and sources that only a later instruction of another opcode of the same unit protects:
// bit counts, conversions and functions; shared atomics and shuffles; textures; REDUX.
// FEW: only the kernels whose cubin is committed; the pairs are counted in all.

extern "C" __global__ void popc_rcp(float* out, const float* in, const unsigned* m, int n) {
    int t = threadIdx.x;
    unsigned active = __activemask(), low;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(low));
    int c = __popc(m[t] & low & active);
    float x = in[t], q = __fdividef((float)n, x), r = __fdividef(1.0f, (float)t), s = 0;
    for (int k = 0; k < c; ++k) s += r * q;
    out[t - c] = q * r + s + c;
}

template <int Kind>
__device__ __forceinline__ int first(int i, float f, double d) {
    if (Kind == 0) return __popc(i);
    if (Kind == 1) return __clz(i);
    if (Kind == 2) return __brev(i);
    if (Kind == 3) return (int)d;
    return (int)(long long)(f * 3.0f);
}

template <int Kind>
__device__ __forceinline__ float second(int i, float f, double d) {
    if (Kind == 0) return __sinf(f);
    if (Kind == 1) return (float)d;
    if (Kind == 2) return rintf(f);
    if (Kind == 3) return (float)(long long)((long long)i * i);
    return (float)(char)i;
}

// Each mixes two operations of the unit in a loop, in both orders.
#define MIX(A, B)                                                                              \
    extern "C" __global__ void mix_##A##_##B(int* gi, float* gf, const double* gd, int n) {    \
        int i = gi[threadIdx.x], j = n;                                                        \
        float f = gf[threadIdx.x], g = n * 0.5f;                                               \
        double d = gd[threadIdx.x];                                                            \
        for (int k = 0; k < n; ++k) {                                                          \
            int a = first<A>(i, f, d);                                                         \
            float x = second<B>(j, g, d);                                                      \
            i = i * 3 + k, f = f * 1.5f + x;                                                   \
            float y = second<B>(i, f, d);                                                      \
            int b = first<A>(j ^ a, y, d);                                                     \
            j = b + a * k, g = y + x;                                                          \
            if (b > 3) f += __fdividef(g, x);                                                  \
            d += a;                                                                            \
        }                                                                                      \
        gi[threadIdx.x] = i ^ j;                                                               \
        gf[threadIdx.x] = f + g + (float)d;                                                    \
    }
MIX(0, 0)
#ifndef FEW
MIX(0, 1) MIX(0, 2) MIX(0, 3) MIX(0, 4) MIX(1, 0) MIX(1, 1) MIX(1, 2) MIX(1, 3)
MIX(1, 4) MIX(2, 0) MIX(2, 2) MIX(2, 4) MIX(3, 0) MIX(3, 2) MIX(3, 3) MIX(4, 0) MIX(4, 1)
#endif

extern "C" __global__ void shuffle_then_atomic(int* gi, float* gf, int n) {
    __shared__ int s[64];
    int t = threadIdx.x, i = gi[t];
    float f = gf[t];
    s[t & 63] = i;
    __syncthreads();
    for (int k = 0; k < n; ++k) {
        float g = __shfl_down_sync(~0u, f, 2);
        int old = atomicMax(&s[i & 63], k);
        if (old > 9) f += g * 1.5f;
        i = i * 3 + old;
        f += __shfl_xor_sync(~0u, f, 4);
        i ^= atomicExch(&s[(i >> 3) & 63], old);
    }
    gi[t] = i;
    gf[t] = f;
}

extern "C" __global__ void three_reads(cudaTextureObject_t tx, float* out, int n) {
    int t = threadIdx.x;
    float a = tex2D<float>(tx, t, 0.5f), b = tex2D<float>(tx, t, 1.5f);
    out[t] = a + b;
    out[t + n] = tex1Dfetch<float>(tx, t) * b;
}

extern "C" __global__ void reads_and_writes(
    cudaTextureObject_t tx, cudaSurfaceObject_t sf, float* out, int n) {
    int t = threadIdx.x;
    float a = tex2D<float>(tx, t, 0.5f), b = tex2D<float>(tx, t, 1.5f);
    out[t] = a;
    float c = tex1Dfetch<float>(tx, t);
    surf2Dwrite(a + b, sf, t * 4, 0);
    float d;
    surf2Dread(&d, sf, (t ^ 1) * 4, 0);
    out[t + n] = b + c + d;
}

#if __CUDA_ARCH__ >= 800
extern "C" __global__ void reductions(int* out, int* in, int n) {
    int t = threadIdx.x, v = in[t];
    for (int k = 0; k < n; ++k) {
        int x = __reduce_add_sync(~0u, v), y = __reduce_add_sync(~0u, v ^ k);
        int z = __reduce_max_sync(~0u, v + k);
        v = t + k * 3;
        in[t + k] = x + y + z + v;
    }
    out[t] = v;
}
#endif
