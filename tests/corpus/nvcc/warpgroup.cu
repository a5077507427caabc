// sm_90a: a matrix operand in registers, loaded for the next product while one is in flight.
#include <cstdint>

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ uint64_t tile_descriptor(const void *p)
{
    uint64_t d = (uint64_t)((shared_address(p) & 0x3FFFF) >> 4);
    return d | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

// d (64 x 32) += a (64 x 16, in registers) * b (16 x 32)
__device__ __forceinline__ void multiply(float (&d)[16], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, "
                 "1, 1, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                   "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),
                   "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void load(uint32_t (&a)[4], const void *from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(shared_address(from)));
}

extern "C" __global__ void __launch_bounds__(128) operand_in_registers(float *y, const float *x, int k)
{
    __shared__ alignas(1024) uint16_t a[8][64 * 16], b[8][16 * 32];
    for (int i = threadIdx.x; i < 8 * 64 * 16; i += 128)
        (&a[0][0])[i] = (uint16_t)x[i];
    for (int i = threadIdx.x; i < 8 * 16 * 32; i += 128)
        (&b[0][0])[i] = (uint16_t)x[i + 9000];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    float d[16] = {};
    uint32_t even[4], odd[4];
    load(even, a[0] + threadIdx.x * 8);
    for (int step = 0; step < k; step += 2) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        multiply(d, even, tile_descriptor(b[step & 7]));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        load(odd, a[(step + 1) & 7] + threadIdx.x * 8);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        multiply(d, odd, tile_descriptor(b[(step + 1) & 7]));
        asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 1;" ::: "memory");
        load(even, a[(step + 2) & 7] + threadIdx.x * 8);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    for (int i = 0; i < 16; ++i)
        y[threadIdx.x * 16 + i] = d[i] * 2;
}

// Two groups in flight, with different accumulators; the first is used while the second runs.
extern "C" __global__ void __launch_bounds__(128) two_groups(float *y, const uint32_t *x)
{
    __shared__ alignas(1024) uint16_t b[2][16 * 32];
    for (int i = threadIdx.x; i < 2 * 16 * 32; i += 128)
        (&b[0][0])[i] = (uint16_t)x[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    float first[16] = {}, second[16] = {};
    uint32_t p[4], q[4];
    for (int i = 0; i < 4; ++i)
        p[i] = x[threadIdx.x * 8 + i], q[i] = x[threadIdx.x * 8 + 4 + i];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply(first, p, tile_descriptor(b[0]));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    multiply(second, q, tile_descriptor(b[1]));
    asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 1;" ::: "memory");
    float sum = 0;
    for (int i = 0; i < 16; ++i)
        sum += first[i] * first[i];
    p[0] = __float_as_uint(sum);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 16; ++i)
        y[threadIdx.x * 16 + i] = second[i] + sum;
    y[9000 + threadIdx.x] = __uint_as_float(p[0]);
}
