// Acquires, releases and fences of each scope in global memory.

#define ACQUIRE(SCOPE)                                                                             \
    extern "C" __global__ void acquire_##SCOPE(const int *flag, const int *data, int *out)         \
    {                                                                                              \
        int f;                                                                                     \
        asm volatile("ld.acquire." #SCOPE ".global.u32 %0, [%1];"                                  \
                     : "=r"(f) : "l"(flag) : "memory");                                            \
        out[threadIdx.x] = data[threadIdx.x];                                                      \
        out[threadIdx.x + 64] = f;                                                                 \
    }
ACQUIRE(cta)
ACQUIRE(gpu)
ACQUIRE(sys)

#define RELEASE(SCOPE)                                                                             \
    extern "C" __global__ void release_##SCOPE(int *flag, const int *in, int *data)                \
    {                                                                                              \
        int v = in[threadIdx.x];                                                                   \
        data[threadIdx.x] = 7;                                                                     \
        asm volatile("st.release." #SCOPE ".global.u32 [%0], %1;" ::"l"(flag), "r"(1) : "memory"); \
        data[threadIdx.x + 64] = v;                                                                \
    }
RELEASE(cta)
RELEASE(gpu)
RELEASE(sys)

#define EXCHANGE(SCOPE)                                                                            \
    extern "C" __global__ void exchange_##SCOPE(int *flag, const int *in, int *data, int *out)     \
    {                                                                                              \
        int old, v = in[threadIdx.x];                                                              \
        data[threadIdx.x] = 7;                                                                     \
        asm volatile("atom.acq_rel." #SCOPE ".global.exch.b32 %0, [%1], 1;"                        \
                     : "=r"(old) : "l"(flag) : "memory");                                          \
        out[threadIdx.x] = data[threadIdx.x + 256];                                                \
        out[threadIdx.x + 64] = old + v;                                                           \
    }
EXCHANGE(cta)
EXCHANGE(gpu)
EXCHANGE(sys)

// The result of the exchange is not read: only its order matters.
extern "C" __global__ void exchange_unread(int *flag, const int *data, int *out)
{
    asm volatile("{ .reg .b32 old; atom.acq_rel.gpu.global.exch.b32 old, [%0], 1; }"
                 ::"l"(flag) : "memory");
    out[threadIdx.x] = data[threadIdx.x];
}

#define FENCE(KIND, SCOPE)                                                                         \
    extern "C" __global__ void fence_##KIND##_##SCOPE(volatile int *x, volatile int *y,            \
                                                      const int *in, int *out)                     \
    {                                                                                              \
        int v = in[threadIdx.x], w = *y;                                                           \
        *x = 1;                                                                                    \
        asm volatile("fence." #KIND "." #SCOPE ";" ::: "memory");                                  \
        out[threadIdx.x] = *y;                                                                     \
        out[threadIdx.x + 64] = v + w;                                                             \
    }
FENCE(sc, cta)
FENCE(sc, gpu)
FENCE(sc, sys)
FENCE(acq_rel, cta)
FENCE(acq_rel, gpu)
FENCE(acq_rel, sys)

// Several plain loads after a fence that sets a scoreboard.
extern "C" __global__ void loads_after_fence(int *x, const int *y, int *out, int n)
{
    x[threadIdx.x] = n;
    asm volatile("fence.sc.cta;" ::: "memory");
    int a = y[0], b = y[n], c = y[threadIdx.x];
    out[threadIdx.x] = a + b * c;
}
