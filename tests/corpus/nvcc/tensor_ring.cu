// sm_100a: one warp issues matrix products in a loop over a ring of stages, another one fills them.
#include <cstdint>

#define STAGES 4

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address)
{
    uint64_t d = (uint64_t)((address & 0x3FFFF) >> 4);
    return d | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 46 | (uint64_t)2 << 61;
}

__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t phase)
{
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "AGAIN%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t"
                 "@p bra DONE%=;\n\tbra AGAIN%=;\n\tDONE%=:\n\t}" ::"r"(barrier), "r"(phase) : "memory");
}

__device__ __forceinline__ void commit(uint32_t barrier)
{
    asm volatile("{\n\t.reg .pred e;\n\telect.sync _|e, -1;\n\t"
                 "@e tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];\n\t}"
                 ::"r"(barrier) : "memory");
}

extern "C" __global__ void __launch_bounds__(128) ring_gemm(float *y, const char *a, const char *b, int steps)
{
    extern __shared__ __align__(1024) char stages[];
    __shared__ uint32_t place;
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES], done;
    if (threadIdx.x < 32) {
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 64;"
                     ::"r"(shared_address(&place)) : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    }
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full + s)));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(empty + s)));
        }
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&done)));
    }
    __syncthreads();
    uint32_t tmem = place, base = shared_address(stages), idesc = 1u << 4 | 8u << 17 | 8u << 24;
    if (threadIdx.x == 0) {
        for (int k = 0; k < steps; ++k) {
            int s = k % STAGES;
            wait_for(shared_address(empty + s), (k / STAGES & 1) ^ 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 24576;"
                         ::"r"(shared_address(full + s)) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16384, [%2];"
                         ::"r"(base + s * 24576), "l"(a + k * 16384), "r"(shared_address(full + s)) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 8192, [%2];"
                         ::"r"(base + s * 24576 + 16384), "l"(b + k * 8192), "r"(shared_address(full + s)) : "memory");
        }
    } else if (__shfl_sync(~0u, threadIdx.x / 32, 0) == 1) {
        for (int k = 0; k < steps; ++k) {
            int s = k % STAGES;
            wait_for(shared_address(full + s), k / STAGES & 1);
            for (int q = 0; q < 4; ++q)
                asm volatile("{\n\t.reg .pred p, e;\n\tsetp.ne.u32 p, %4, 0;\n\telect.sync _|e, -1;\n\t"
                             "@e tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n\t}"
                             ::"r"(tmem), "l"(tile_descriptor(base + s * 24576) + q * 2),
                               "l"(tile_descriptor(base + s * 24576 + 16384) + q * 2),
                               "r"(idesc), "r"(k + q) : "memory");
            commit(shared_address(empty + s));
        }
        commit(shared_address(&done));
    }
    wait_for(shared_address(&done), 0);
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
    __syncthreads();
    if (threadIdx.x < 32)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 64;" ::"r"(tmem));
}
