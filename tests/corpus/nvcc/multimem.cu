// Loads that reduce over the GPUs of a multicast group (LDGMC), as all-reduce kernels have them.
#define LOAD(TYPE, ...)                                                                        \
    asm volatile("multimem.ld_reduce.relaxed.sys.global." TYPE " " __VA_ARGS__)

extern "C" __global__ void reduce_halves(uint4* out, const uint4* group, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        uint4 v;
        LOAD("add.v4.f16x2", "{%0, %1, %2, %3}, [%4];"
             : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(group + i) : "memory");
        out[i] = v;
    }
}

extern "C" __global__ void reduce_words(float4* out, const float4* group, const int* counts, double* sum) {
    int i = threadIdx.x, most;
    float4 v;
    double d;
    LOAD("add.v4.f32", "{%0, %1, %2, %3}, [%4];"
         : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(group + i) : "memory");
    LOAD("max.s32", "%0, [%1];" : "=r"(most) : "l"(counts + i) : "memory");
    LOAD("add.f64", "%0, [%1];" : "=d"(d) : "l"(sum + i) : "memory");
    if (most > 3) v.x *= d;
    out[i] = v;
}
