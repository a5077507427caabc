// Acquires of shared memory; relaxed and volatile loads of one shared location.
#include <cstdint>
#include <cuda/atomic>

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

extern "C" __global__ void shared_acquire(int *out, int n)
{
    __shared__ int flag, data[64];
    if (threadIdx.x == 0) {
        data[0] = n;
        asm volatile("st.release.cta.shared.u32 [%0], %1;"
                     ::"r"(shared_address(&flag)), "r"(1) : "memory");
    }
    int f;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
                 : "=r"(f) : "r"(shared_address(&flag)) : "memory");
    out[threadIdx.x * 2] = f;
    out[threadIdx.x * 2 + 1] = data[n & 63];
}

extern "C" __global__ void shared_exchange(int *out, int n)
{
    __shared__ int flag, data[64];
    data[threadIdx.x] = n;
    int old;
    asm volatile("atom.acq_rel.cta.shared.exch.b32 %0, [%1], 1;"
                 : "=r"(old) : "r"(shared_address(&flag)) : "memory");
    out[threadIdx.x * 2] = old;
    out[threadIdx.x * 2 + 1] = data[n & 63];
}

extern "C" __global__ void generic_acquire(int *out, int n)
{
    __shared__ cuda::atomic<int, cuda::thread_scope_block> flag;
    __shared__ int data[64];
    if (threadIdx.x == 0) {
        data[0] = n;
        flag.store(1, cuda::memory_order_release);
    }
    out[threadIdx.x * 2] = flag.load(cuda::memory_order_acquire);
    out[threadIdx.x * 2 + 1] = data[n & 63];
}

// Two reads of one location by one thread: the second must not return an older value.
extern "C" __global__ void coherent_reads(int *out, const int *in)
{
    __shared__ int x[64];
    x[threadIdx.x] = in[threadIdx.x];
    uint32_t place = shared_address(&x[in[1] & 63]);
    int first, second;
    asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];" : "=r"(first) : "r"(place) : "memory");
    asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];" : "=r"(second) : "r"(place) : "memory");
    out[threadIdx.x * 2] = first;
    out[threadIdx.x * 2 + 1] = second;
}

// The two addresses are equal for some threads and launches only.
extern "C" __global__ void maybe_coherent_reads(int *out, const int *in, int n, int m)
{
    __shared__ volatile int x[256];
    x[threadIdx.x] = in[threadIdx.x];
    int first = x[(threadIdx.x + n) & 255], second = x[(threadIdx.x * m) & 255];
    out[threadIdx.x * 2] = first;
    out[threadIdx.x * 2 + 1] = second;
}

// A wide read and a narrow one of its last word.
extern "C" __global__ void overlapping_reads(int *out, const int *in)
{
    __shared__ __align__(16) volatile int x[256];
    x[threadIdx.x] = in[threadIdx.x];
    uint32_t place = shared_address((const void *)&x[(in[1] & 63) * 4]);
    int a, b, c;
    asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(a), "=r"(b) : "r"(place) : "memory");
    asm volatile("ld.volatile.shared.u32 %0, [%1 + 4];" : "=r"(c) : "r"(place) : "memory");
    out[threadIdx.x * 2] = a + b;
    out[threadIdx.x * 2 + 1] = c;
}
