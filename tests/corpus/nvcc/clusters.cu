// Clusters of blocks: distributed shared memory, cluster barriers, bulk copies with mbarriers.
#include <cooperative_groups.h>
#include <cstdint>

namespace cg = cooperative_groups;

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier_init(uint64_t *bar, int count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count));
}

__device__ __forceinline__ void barrier_wait(uint64_t *bar, uint32_t phase)
{
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t"
                 "@p bra DONE;\n\tbra AGAIN;\n\tDONE:\n\t}"
                 ::"r"(shared_address(bar)), "r"(phase) : "memory");
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster_sum(float *y, const float *x)
{
    __shared__ float box[256];
    auto cluster = cg::this_cluster();
    box[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
    cluster.sync();
    const float *other = cluster.map_shared_rank(box, cluster.block_rank() ^ 1);
    float v = box[threadIdx.x] + other[255 - threadIdx.x];
    cluster.sync();
    y[blockIdx.x * 256 + threadIdx.x] = v;
}

extern "C" __global__ void __cluster_dims__(4, 1, 1) cluster_histogram(int *y, const int *x, int n)
{
    __shared__ int bins[64];
    auto cluster = cg::this_cluster();
    if (threadIdx.x < 64)
        bins[threadIdx.x] = 0;
    cluster.sync();
    for (int i = cluster.thread_rank(); i < n; i += cluster.num_threads()) {
        int v = x[i] & 255;
        atomicAdd(cluster.map_shared_rank(bins, v / 64) + v % 64, 1);
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (threadIdx.x < 64)
        atomicAdd(y + cluster.block_rank() * 64 + threadIdx.x, bins[threadIdx.x]);
}

extern "C" __global__ void bulk_copy(float *y, const float *x, int tiles)
{
    __shared__ alignas(128) float box[2][1024];
    __shared__ alignas(128) float out[1024];
    __shared__ alignas(8) uint64_t full[2];
    if (threadIdx.x == 0) {
        barrier_init(&full[0], 1);
        barrier_init(&full[1], 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    for (int k = 0; k < tiles; ++k) {
        int s = k & 1;
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                         ::"r"(shared_address(&full[s])), "r"(4096) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         ::"r"(shared_address(box[s])), "l"(x + k * 1024), "r"(4096), "r"(shared_address(&full[s]))
                         : "memory");
        }
        barrier_wait(&full[s], k >> 1 & 1);
        for (int i = threadIdx.x; i < 1024; i += blockDim.x)
            out[i] = box[s][1023 - i] * 2.0f;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (threadIdx.x == 0) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                         ::"l"(y + k * 1024), "r"(shared_address(out)), "r"(4096) : "memory");
            asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
        }
        __syncthreads();
    }
}

extern "C" __global__ void barrier_pipeline(float *y, const float *x, int n)
{
    __shared__ alignas(16) float box[4][128];
    __shared__ alignas(8) uint64_t full[4], empty[4];
    if (threadIdx.x < 4) {
        barrier_init(&full[threadIdx.x], 128);
        barrier_init(&empty[threadIdx.x], 128);
    }
    __syncthreads();
    int i = threadIdx.x % 128;
    if (threadIdx.x >= 128) {
        for (int k = 0; k < n; ++k) {
            if (k >= 4)
                barrier_wait(&empty[k & 3], (k / 4 - 1) & 1);
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                         ::"r"(shared_address(&box[k & 3][i])), "l"(x + k * 128 + i) : "memory");
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
                         ::"r"(shared_address(&full[k & 3])) : "memory");
        }
    } else {
        float sum = 0.0f;
        for (int k = 0; k < n; ++k) {
            barrier_wait(&full[k & 3], k / 4 & 1);
            sum += box[k & 3][127 - i];
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&empty[k & 3])) : "memory");
        }
        y[i] = sum;
    }
}

extern "C" __global__ void elect_one(int *y)
{
    uint32_t chosen;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(chosen));
    if (chosen)
        y[threadIdx.x / 32] = threadIdx.x;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
}
