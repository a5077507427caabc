// sm_100a: tensor memory and its matrix instructions.
#include <cstdint>

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ uint64_t tile_descriptor(const void *p)
{
    uint64_t d = (uint64_t)((shared_address(p) & 0x3FFFF) >> 4);
    return d | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 46 | (uint64_t)2 << 61;
}

extern "C" __global__ void __launch_bounds__(128) tensor_memory_gemm(float *y, const uint4 *a, const uint4 *b, int k)
{
    __shared__ alignas(1024) uint4 sa[1024], sb[512];
    __shared__ uint32_t place;
    __shared__ alignas(8) uint64_t done;
    if (threadIdx.x < 32) {
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 64;"
                     ::"r"(shared_address(&place)) : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    }
    if (threadIdx.x == 0)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&done)));
    __syncthreads();
    uint32_t tmem = place, idesc = 1u << 4 | 8u << 17 | 8u << 24, phase = 0;
    for (int p = 0; p < k; p += 64) {
        for (int i = threadIdx.x; i < 1024; i += 128)
            sa[i ^ (i >> 3 & 7)] = a[p * 16 + i];
        for (int i = threadIdx.x; i < 512; i += 128)
            sb[i ^ (i >> 3 & 7)] = b[p * 8 + i];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int q = 0; q < 4; ++q)
                asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %4, 0;\n\t"
                             "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n\t}"
                             ::"r"(tmem), "l"(tile_descriptor(sa + q * 2)), "l"(tile_descriptor(sb + q * 2)),
                               "r"(idesc), "r"(p + q) : "memory");
            asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
                         ::"r"(shared_address(&done)) : "memory");
        }
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t"
                     "@p bra DONE;\n\tbra AGAIN;\n\tDONE:\n\t}"
                     ::"r"(shared_address(&done)), "r"(phase) : "memory");
        phase ^= 1;
    }
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    uint32_t v[8];
    for (int c = 0; c < 64; c += 8) {
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]), "=r"(v[7])
                     : "r"(tmem + c + (threadIdx.x / 32 << 21)));
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        for (int i = 0; i < 8; ++i)
            y[threadIdx.x * 64 + c + i] = __uint_as_float(v[i]);
    }
    asm volatile("tcgen05.st.sync.aligned.32x32b.x4.b32 [%0], {%1,%2,%3,%4};"
                 ::"r"(tmem), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
    __syncthreads();
    if (threadIdx.x < 32)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 64;" ::"r"(tmem));
}
