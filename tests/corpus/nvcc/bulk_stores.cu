// Bulk stores and arrivals at mbarriers in a row: some have no scoreboard, and rely on a later one's.
#include <cstdint>

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

struct Map { alignas(64) char bytes[128]; };

extern "C" __global__ void __launch_bounds__(128)
bulk_stores(const __grid_constant__ Map map, const float4 *x, int tiles)
{
    __shared__ alignas(1024) float4 tile[4][512];
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        for (int i = threadIdx.x; i < 2048; i += 128)
            tile[i / 512][i % 512] = x[t * 2048 + i];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll
            for (int q = 0; q < 12; ++q)
                asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];"
                             ::"l"(&map), "r"(q * 32 + t), "r"(t * 64), "r"(tiles), "r"(shared_address(tile[0]) + q * 2048)
                             : "memory");
            asm volatile("cp.async.bulk.commit_group;");
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(128)
arrivals_in_loop(float *y, const int *sizes, int n)
{
    __shared__ alignas(8) uint64_t bars[2];
    __shared__ float s[2][128];
    bool first = threadIdx.x == 0;
    if (first)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tmbarrier.init.shared::cta.b64 [%1], 1;"
                     ::"r"(shared_address(bars)), "r"(shared_address(bars + 1)));
    __syncthreads();
    float sum = 0;
    for (int k = 0; k < n; ++k) {
        int a = sizes[threadIdx.x + k], b = a * 256;
        s[0][threadIdx.x] = a;
        if (first)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n\t"
                         "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%2], %3;"
                         ::"r"(shared_address(bars)), "r"(a * 8), "r"(shared_address(bars + 1)), "r"(b) : "memory");
        s[1][threadIdx.x] = b;
        __syncthreads();
        sum += s[0][threadIdx.x ^ n] - s[1][(threadIdx.x + n) & 127];
        __syncthreads();
    }
    y[threadIdx.x] = sum;
}
