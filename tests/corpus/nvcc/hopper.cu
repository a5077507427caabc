// sm_90a: tensor maps, warpgroup matrix instructions, register reallocation, producer and consumers.
#include <cstdint>
#include <cuda.h>

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ uint64_t tile_descriptor(const void *p)
{
    // 128-byte swizzle, 1024 bytes between groups of eight rows.
    uint64_t d = (uint64_t)((shared_address(p) & 0x3FFFF) >> 4);
    return d | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

__device__ __forceinline__ void barrier_wait(uint64_t *bar, uint32_t phase)
{
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t"
                 "@p bra DONE;\n\tbra AGAIN;\n\tDONE:\n\t}"
                 ::"r"(shared_address(bar)), "r"(phase) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t *bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

__device__ __forceinline__ void load_tile(void *to, const CUtensorMap *map, int x, int y, uint64_t *bar)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 ::"r"(shared_address(to)), "l"(map), "r"(x), "r"(y), "r"(shared_address(bar)) : "memory");
}

// d (64 x 64) += a (64 x 16) * b (64 x 16) transposed
__device__ __forceinline__ void warpgroup_mma(float (&d)[32], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
                   "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
                   "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
                   "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b));
}

constexpr int STAGES = 4;
struct Shared {
    alignas(1024) uint16_t a[STAGES][64 * 64];
    alignas(1024) uint16_t b[STAGES][64 * 64];
    alignas(8) uint64_t full[STAGES], empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(256, 1)
specialised_gemm(float *y, const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                 int n, int k)
{
    extern __shared__ uint8_t raw[];
    Shared &s = *reinterpret_cast<Shared *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&s.full[i])));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" ::"r"(shared_address(&s.empty[i])));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&a) : "memory");
    }
    __syncthreads();
    int steps = k / 64;
    if (threadIdx.x >= 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 128)
            for (int i = 0; i < steps; ++i) {
                int slot = i % STAGES;
                barrier_wait(&s.empty[slot], (i / STAGES & 1) ^ 1);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                             ::"r"(shared_address(&s.full[slot])), "r"(2 * 64 * 64 * 2) : "memory");
                load_tile(s.a[slot], &a, i * 64, blockIdx.y * 64, &s.full[slot]);
                load_tile(s.b[slot], &b, i * 64, blockIdx.x * 64, &s.full[slot]);
            }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        float d[32] = {};
        for (int i = 0; i < steps; ++i) {
            int slot = i % STAGES;
            barrier_wait(&s.full[slot], i / STAGES & 1);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            for (int p = 0; p < 4; ++p)
                warpgroup_mma(d, tile_descriptor(s.a[slot] + p * 16), tile_descriptor(s.b[slot] + p * 16));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (i > 0)
                barrier_arrive(&s.empty[(i - 1) % STAGES]);
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        int row = blockIdx.y * 64 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
        int column = blockIdx.x * 64 + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            *(float2 *)(y + row * n + column + i * 2) = make_float2(d[i], d[i + 1]);
            *(float2 *)(y + (row + 8) * n + column + i * 2) = make_float2(d[i + 2], d[i + 3]);
        }
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1)
multicast(float *y, const __grid_constant__ CUtensorMap x)
{
    __shared__ alignas(1024) float tile[32 * 32];
    __shared__ alignas(8) uint64_t bar;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&bar)));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 4096;" ::"r"(shared_address(&bar)) : "memory");
    }
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (rank == 0 && threadIdx.x == 0)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                     ::"r"(shared_address(tile)), "l"(&x), "r"(0), "r"(blockIdx.y * 32), "r"(shared_address(&bar)),
                       "h"((uint16_t)3) : "memory");
    barrier_wait(&bar, 0);
    y[blockIdx.x * 1024 + threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void store_tiles(const __grid_constant__ CUtensorMap y, const uint32_t *x)
{
    __shared__ alignas(1024) uint32_t tile[32 * 32];
    uint32_t v[4];
    for (int i = 0; i < 4; ++i)
        v[i] = x[threadIdx.x * 4 + i];
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(shared_address(tile + threadIdx.x * 4)), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                     ::"l"(&y), "r"(0), "r"(blockIdx.x * 32), "r"(shared_address(tile)) : "memory");
        asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
                     ::"l"(&y), "r"(0), "r"(blockIdx.x * 32), "r"(shared_address(tile)) : "memory");
        asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group 0;" ::: "memory");
    }
}
