// Warp-wide matrix instructions: ldmatrix, mma of every type, movmatrix, wmma.
#include <cstdint>
#include <cuda_fp16.h>
#include <mma.h>

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

extern "C" __global__ void mma_loop(float *y, const __half *a, const __half *b, int k)
{
    __shared__ __align__(16) __half sa[16 * 16], sb[16 * 16];
    int lane = threadIdx.x;
    float c[4] = {};
    for (int p = 0; p < k; p += 16) {
        *(uint4 *)&sa[lane * 8] = *(const uint4 *)(a + lane / 2 * k + p + lane % 2 * 8);
        *(uint4 *)&sb[lane * 8] = *(const uint4 *)(b + lane / 2 * k + p + lane % 2 * 8);
        __syncwarp();
        uint32_t x[4], z[2];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(shared_address(sa + lane % 16 * 16 + lane / 16 * 8)));
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                     : "=r"(z[0]), "=r"(z[1]) : "r"(shared_address(sb + lane % 16 * 16)));
#if __CUDA_ARCH__ >= 800
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                     "{%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(z[0]), "r"(z[1]));
#else
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(x[0]), "r"(x[1]), "r"(z[0]));
#endif
        __syncwarp();
    }
    *(float4 *)(y + lane * 4) = make_float4(c[0], c[1], c[2], c[3]);
}

extern "C" __global__ void wmma_tile(float *y, const __half *a, const __half *b, int k)
{
    using namespace nvcuda;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> x;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::col_major> z;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
    wmma::fill_fragment(c, 0.0f);
    for (int p = 0; p < k; p += 16) {
        wmma::load_matrix_sync(x, a + p, k);
        wmma::load_matrix_sync(z, b + p, k);
        wmma::mma_sync(c, x, z, c);
    }
    wmma::store_matrix_sync(y, c, 16, wmma::mem_row_major);
}

extern "C" __global__ void mma_int8(int *y, const uint32_t *x)
{
    int lane = threadIdx.x, c[4] = {1, 2, 3, 4};
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                 : "+r"(c[0]), "+r"(c[1]) : "r"(x[lane]), "r"(x[lane + 32]));
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(x[lane]), "r"(x[lane + 64]), "r"(x[lane + 96]), "r"(x[lane + 128]),
                   "r"(x[lane + 160]), "r"(x[lane + 192]));
#endif
    *(int4 *)(y + lane * 4) = make_int4(c[0], c[1], c[2], c[3]);
}

extern "C" __global__ void transpose_8x8(uint32_t *y, const uint32_t *x)
{
    uint32_t v = x[threadIdx.x];
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(v));
    y[threadIdx.x] = v;
}

#if __CUDA_ARCH__ >= 800
extern "C" __global__ void mma_double(double *y, const double *x)
{
    int lane = threadIdx.x;
    double c0 = 0.0, c1 = 0.0;
    for (int k = 0; k < 4; ++k)
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                     : "+d"(c0), "+d"(c1) : "d"(x[k * 64 + lane]), "d"(x[k * 64 + 32 + lane]));
    y[lane * 2] = c0;
    y[lane * 2 + 1] = c1;
}

extern "C" __global__ void mma_tf32_bf16(float *y, const uint32_t *x)
{
    int lane = threadIdx.x;
    float c[4] = {};
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(x[lane]), "r"(x[lane + 32]), "r"(x[lane + 64]), "r"(x[lane + 96]), "r"(x[lane + 128]),
                   "r"(x[lane + 160]));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(x[lane]), "r"(x[lane + 32]), "r"(x[lane + 64]), "r"(x[lane + 96]), "r"(x[lane + 128]),
                   "r"(x[lane + 160]));
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0x0;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(x[lane]), "r"(x[lane + 32]), "r"(x[lane + 64]), "r"(x[lane + 96]), "r"(x[lane + 128]),
                   "r"(x[lane + 160]), "r"(x[lane + 192]), "r"(x[lane + 224]), "r"(x[lane + 256]));
    *(float4 *)(y + lane * 4) = make_float4(c[0], c[1], c[2], c[3]);
}
#endif

#if __CUDA_ARCH__ >= 890
extern "C" __global__ void mma_fp8(float *y, const uint32_t *x)
{
    int lane = threadIdx.x;
    float c[4] = {};
    for (int k = 0; k < 3; ++k)
        asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                     "{%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(x[lane + k]), "r"(x[lane + 32]), "r"(x[lane + 64]), "r"(x[lane + 96]),
                       "r"(x[lane + 128]), "r"(x[lane + 160]));
    *(float4 *)(y + lane * 4) = make_float4(c[0], c[1], c[2], c[3]);
}
#endif
