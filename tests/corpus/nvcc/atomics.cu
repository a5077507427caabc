// Atomic operations of every kind, width and scope; ordered loads, stores and fences.
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void global_atomics(int *x, unsigned *u, unsigned long long *l, float *f,
                                          double *d, const int *v, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    int a = v[i];
    atomicAdd(x + a, a);
    atomicSub(x + 1, a);
    atomicMax(x + 2, a);
    atomicMin(x + 3, a);
    atomicAnd(x + 4, a);
    atomicOr(x + 5, a);
    atomicXor(x + 6, a);
    x[8] = atomicExch(x + 7, a);
    x[10] = atomicCAS(x + 9, a, i);
    u[1] = atomicInc(u, 100);
    u[3] = atomicDec(u + 2, 100);
    l[1] = atomicAdd(l, 1ull);
    atomicMax(l + 2, (unsigned long long)a);
    l[4] = atomicCAS(l + 3, (unsigned long long)a, (unsigned long long)i);
    l[6] = atomicExch(l + 5, (unsigned long long)a);
    f[1] = atomicAdd(f, 1.0f);
    atomicAdd(f + 2, 2.0f);
    atomicAdd(d, 1.0);
    d[1] = atomicAdd(d + 2, 1.0);
}

extern "C" __global__ void narrow_atomics(__half2 *h, __nv_bfloat162 *b, __half *s, unsigned short *c)
{
    int i = threadIdx.x;
    atomicAdd(h + i, __floats2half2_rn(1.0f, 2.0f));
    atomicAdd(s + i, __float2half(1.0f));
#if __CUDA_ARCH__ >= 800
    atomicAdd(b + i, __floats2bfloat162_rn(1.0f, 2.0f));
#endif
    c[1] = atomicCAS(c + i, (unsigned short)1, (unsigned short)i);
}

extern "C" __global__ void scoped_atomics(int *x, float *f)
{
    int i = threadIdx.x;
    atomicAdd_block(x + i, 1);
    atomicAdd_system(x + i + 1, 1);
    x[0] = atomicCAS_block(x + 2, i, 3);
    x[1] = atomicCAS_system(x + 4, i, 3);
    atomicMax_system(x + 5, i);
    atomicAdd_system(f, 1.0f);
}

extern "C" __global__ void shared_atomics(int *y, const uint8_t *x, int n)
{
    __shared__ int bins[256];
    __shared__ float most;
    __shared__ unsigned long long wide;
    bins[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        most = 0.0f;
        wide = 0;
    }
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        atomicAdd(&bins[x[i]], 1);
        atomicAdd(&most, (float)x[i]);
        atomicMax(&bins[0], i);
        atomicAdd(&wide, 1ull);
        y[i] = atomicExch(&bins[1], i) + atomicCAS(&bins[2], 1, i);
    }
    __syncthreads();
    atomicAdd(y + threadIdx.x, bins[threadIdx.x] + (int)most + (int)wide);
}

extern "C" __global__ void ordered(int *flag, int *data, volatile int *v, int *out)
{
    int i = threadIdx.x, got;
    if (blockIdx.x == 0) {
        data[i] = i;
        __threadfence();
        asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
    } else {
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(got) : "l"(flag) : "memory");
        } while (got == 0);
        out[i] = data[i];
    }
    v[i] = v[i + 1] + v[i + 2];
    __threadfence_block();
    out[i + 1] = v[i];
    __threadfence_system();
    asm volatile("fence.acq_rel.cta;" ::: "memory");
    asm volatile("fence.sc.gpu;" ::: "memory");
    asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(got) : "l"(flag) : "memory");
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(got) : "l"(flag), "r"(got) : "memory");
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(flag), "r"(got) : "memory");
    asm volatile("atom.acquire.cta.shared.exch.b32 %0, [%1], %2;" : "=r"(got) : "r"(0), "r"(got) : "memory");
    out[i + 2] = got;
}

extern "C" __global__ void spin_lock(int *lock, float *sum, const float *x)
{
    bool done = false;
    while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
            *sum += x[blockIdx.x * blockDim.x + threadIdx.x];
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
        __nanosleep(20);
    }
}

extern "C" __global__ void last_block(float *y, const float *x, unsigned *count)
{
    __shared__ bool last;
    __shared__ float part[8];
    float v = x[blockIdx.x * blockDim.x + threadIdx.x];
    for (int d = 16; d; d >>= 1)
        v += __shfl_down_sync(~0u, v, d);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int k = 1; k < blockDim.x / 32; ++k)
            v += part[k];
        y[blockIdx.x] = v;
        __threadfence();
        last = atomicInc(count, gridDim.x) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float total = 0.0f;
        for (int k = 0; k < gridDim.x; ++k)
            total += ((volatile float *)y)[k];
        y[0] = total;
    }
}
