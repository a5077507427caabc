// Warp-wide operations and divergence: votes, matches, shuffles, reductions, __syncwarp.
#include <cooperative_groups.h>

namespace cg = cooperative_groups;

extern "C" __global__ void votes(unsigned *y, const int *x)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x, v = x[i], whole;
    unsigned r = __ballot_sync(~0u, v > 3) + __any_sync(~0u, v > 90) + __all_sync(~0u, v > 0);
    r += __match_any_sync(~0u, v) ^ __match_all_sync(~0u, v & 1, &whole);
    r += whole + __popc(__activemask()) + __ffs(r) + __clz(r);
    if (v & 1)
        r += __ballot_sync(__activemask(), v > 7);
    unsigned lane, before;
    asm volatile("mov.u32 %0, %%laneid; mov.u32 %1, %%lanemask_lt;" : "=r"(lane), "=r"(before));
    y[i] = r + __popc(r & before) + lane + __syncthreads_count(v > 2);
}

extern "C" __global__ void shuffles(float *y, const float *x, double *d, int source)
{
    int i = threadIdx.x;
    float v = x[i];
    v += __shfl_sync(~0u, v, source);
    v += __shfl_up_sync(~0u, v, 1) * __shfl_down_sync(~0u, v, 2, 16);
    v += __shfl_xor_sync(~0u, v, 4, 8);
    d[i] = __shfl_xor_sync(~0u, d[i], 1) + __shfl_sync(~0u, d[i], v > 0.0f ? 3 : 5);
    if (i % 32 < 8)
        v += __shfl_sync(0xff, v, 3, 8);
    y[i] = v;
}

extern "C" __global__ void warp_reductions(int *y, const int *x)
{
    int v = x[threadIdx.x];
#if __CUDA_ARCH__ >= 800
    unsigned u = v;
    y[0] = __reduce_add_sync(~0u, v);
    y[1] = __reduce_max_sync(~0u, v);
    y[2] = __reduce_min_sync(~0u, u);
    y[3] = __reduce_and_sync(~0u, u) ^ __reduce_or_sync(~0u, u) ^ __reduce_xor_sync(~0u, u);
#else
    for (int s = 1; s < 32; s *= 2)
        v = max(v, __shfl_xor_sync(~0u, v, s));
    y[0] = v;
#endif
}

extern "C" __global__ void sync_in_branches(int *y, const int *x)
{
    __shared__ int box[256];
    int i = threadIdx.x, v = x[i];
    if (i % 32 < 16) {
        box[i] = v;
        __syncwarp(0x0000ffff);
        v += box[i ^ 1];
    } else {
        box[i] = -v;
        __syncwarp(0xffff0000);
        v -= box[i ^ 2];
    }
    __syncwarp();
    box[i] = v;
    __syncwarp();
    y[i] = box[i ^ 16];
}

extern "C" __global__ void uneven_loops(float *y, const float *x, const int *counts)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = x[i];
    for (int k = 0; k < counts[i]; ++k) {
        if (v > 100.0f)
            break;
        if ((k & 3) == 1)
            continue;
        int left = k;
        do {
            v = v * 1.01f + x[left];
        } while (--left > 0 && v < 50.0f);
        if (v < -7.0f)
            goto out;
    }
    v += 1.0f;
out:
    y[i] = v;
}

extern "C" __global__ void early_exits(int *y, const int *x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    int v = x[i];
    if (v < 0) {
        y[i] = -1;
        return;
    }
    if (v == 13)
        __trap();
    while (v != 1) {
        v = v & 1 ? 3 * v + 1 : v >> 1;
        if (__any_sync(__activemask(), v > 1000000))
            return;
    }
    y[i] = v;
}

extern "C" __global__ void groups(int *y, const int *x)
{
    auto block = cg::this_thread_block();
    auto warp = cg::tiled_partition<32>(block);
    auto four = cg::tiled_partition<4>(warp);
    int v = x[block.thread_rank()];
    for (int s = four.size() / 2; s > 0; s /= 2)
        v += four.shfl_down(v, s);
    if (v & 1) {
        auto together = cg::coalesced_threads();
        v += together.size() + together.shfl(v, 0);
    }
    warp.sync();
    auto same = cg::labeled_partition(warp, v & 3);
    v += same.size();
    block.sync();
    y[block.thread_rank()] = v + warp.any(v > 3);
}

extern "C" __global__ void grid_sync(float *y, const float *x, int n)
{
    auto grid = cg::this_grid();
    for (int i = grid.thread_rank(); i < n; i += grid.size())
        y[i] = x[i] * 2.0f;
    grid.sync();
    for (int i = grid.thread_rank(); i < n - 1; i += grid.size())
        y[n + i] = y[i + 1] - y[i];
}

extern "C" __global__ void named_barriers(int *y, const int *x)
{
    __shared__ int ring[2][64];
    int i = threadIdx.x % 64;
    if (threadIdx.x < 64) {
        for (int k = 0; k < 8; ++k) {
            ring[k & 1][i] = x[k * 64 + i];
            asm volatile("bar.arrive %0, 128;" ::"r"(1 + (k & 1)) : "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(3 + (k & 1)) : "memory");
        }
    } else {
        int sum = 0;
        for (int k = 0; k < 8; ++k) {
            asm volatile("bar.sync %0, 128;" ::"r"(1 + (k & 1)) : "memory");
            sum += ring[k & 1][63 - i];
            asm volatile("bar.arrive %0, 128;" ::"r"(3 + (k & 1)) : "memory");
        }
        y[i] = sum;
    }
    y[64 + threadIdx.x] = __syncthreads_or(i == 3) + __syncthreads_and(i) + __syncthreads_count(i > 5);
}
