// Paths to memory: asynchronous copies, textures, surfaces, constants, local arrays, hints, clocks.
#include <cstdint>
#include <cstdio>
#include <cuda_pipeline.h>

__constant__ float weights[64];

extern "C" __global__ void constants(float *y, const float *x, const int *which)
{
    int i = threadIdx.x;
    float v = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k)
        v += weights[k] * x[i + k];
    y[i] = v + weights[which[i]];
}

extern "C" __global__ void asynchronous_copies(float *y, const float *x, int n)
{
    __shared__ __align__(16) float ring[4][256 * 4];
    int i = threadIdx.x;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 3; ++k) {
        __pipeline_memcpy_async(&ring[k][i * 4], x + k * 1024 + i * 4, 16);
        __pipeline_commit();
    }
    for (int k = 0; k < n; ++k) {
        __pipeline_wait_prior(2);
        __syncthreads();
        sum += ring[k & 3][i * 4] * ring[k & 3][(i * 4 + 37) & 1023];
        if (k + 3 < n)
            __pipeline_memcpy_async(&ring[(k + 3) & 3][i * 4], x + (k + 3) * 1024 + i * 4, 16, i == 255 ? 8 : 0);
        __pipeline_commit();
    }
    __pipeline_memcpy_async(&ring[0][i], x + i, 4);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    y[i] = sum + ring[0][255 - i];
}

extern "C" __global__ void textures(float *y, cudaTextureObject_t t1, cudaTextureObject_t t2,
                                    cudaTextureObject_t t3, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float4 a = tex2D<float4>(t2, i * 0.1f, i * 0.2f);
    float4 g = tex2Dgather<float4>(t2, i * 0.3f, 1.0f, 1);
    y[i] = tex1Dfetch<float>(t1, i) + a.x + a.w + g.y + tex3D<float>(t3, i, 1.0f, 2.0f)
           + tex2DLod<float>(t2, 0.5f, i, 2.0f) + tex2DLayered<float>(t3, i, 0.5f, 3);
}

extern "C" __global__ void surfaces(cudaSurfaceObject_t in, cudaSurfaceObject_t out, int width)
{
    int i = threadIdx.x, j = blockIdx.x;
    float4 v = surf2Dread<float4>(in, i * 16, j);
    uchar4 c;
    surf2Dread(&c, in, i * 4, j, cudaBoundaryModeClamp);
    v.x += c.x;
    surf2Dwrite(v, out, (width - i) * 16, j);
    surf1Dwrite((unsigned short)c.y, out, i * 2);
}

extern "C" __global__ void local_array(float *y, const float *x, const int *which, int n)
{
    float box[40];
    int i = threadIdx.x;
    for (int k = 0; k < 40; ++k)
        box[k] = x[i * 40 + k];
    for (int k = 0; k < n; ++k)
        box[which[k] % 40] += box[which[k + 1] % 40] * 0.5f;
    float sum = 0.0f;
    for (int k = 0; k < 40; ++k)
        sum += box[k];
    y[i] = sum;
}

extern "C" __global__ void hints(float4 *y, const float4 *__restrict__ x, float *f, const char *bytes)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float4 a = __ldg(x + i), b = __ldcg(x + i + 1), c = __ldcs(x + i + 2), d = __ldlu(x + i + 3);
    float4 e = __ldcv(x + i + 4);
    a.x += b.x + c.y + d.z + e.w;
    __stcg(y + i, a);
    __stcs(y + i + 1, b);
    __stwt(y + i + 2, c);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(f + i));
    asm volatile("ld.global.L1::evict_last.L2::128B.f32 %0, [%1];" : "=f"(a.x) : "l"(f + i));
    signed char s = bytes[i];
    unsigned short u = *(const unsigned short *)(bytes + 2 * i);
    f[i] = a.x + s + u;
}

extern "C" __global__ void generic_pointers(float *y, const float *x, int n)
{
    __shared__ float box[128];
    float mine[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    box[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    const float *p = n > 3 ? box + n : n > 1 ? mine + (n & 3) : x + n;
    float v = *p;
    if (__isShared(p))
        v += 1.0f;
    y[threadIdx.x] = v;
}

extern "C" __global__ void clocks(long long *y, float *f, int n)
{
    long long start = clock64();
    unsigned c0 = clock();
    float v = f[threadIdx.x];
    for (int i = 0; i < n; ++i)
        v = v * v + 1.0f;
    f[threadIdx.x] = v;
    unsigned long long timer;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(timer));
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    __nanosleep(100);
    y[threadIdx.x] = clock64() - start + (clock() - c0) + (long long)timer + sm;
}

extern "C" __global__ void prints(const int *x, int n)
{
    int v = x[threadIdx.x];
    if (v < 0 || v >= n)
        printf("thread %d has %d, %f\n", threadIdx.x, v, v * 0.5);
}

extern "C" __global__ void structures(uint4 *y, const uchar3 *a, const short2 *b, const double2 *d)
{
    int i = threadIdx.x;
    uchar3 p = a[i];
    short2 q = b[i];
    double2 r = d[i];
    y[i] = make_uint4(p.x + p.y * p.z, q.x - q.y, (unsigned)(r.x * r.y), __byte_perm(p.x, q.y, 0x3210));
}
