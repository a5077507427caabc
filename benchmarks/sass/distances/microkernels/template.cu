// The template of all micro-kernels: its machine code is replaced, its resources stay.
// It has 96 live registers, 36 KB of shared memory, one barrier, and about 6,300 instructions.
extern "C" __global__ void __launch_bounds__(512, 1)
    probe(unsigned *out, const unsigned *in, int stream, int warps)
{
    __shared__ unsigned shared[9216];
    const volatile unsigned *values = in;
    unsigned x[96];
#pragma unroll
    for (int k = 0; k < 96; ++k)
        x[k] = values[k];
    shared[threadIdx.x] = x[0];
    __syncthreads();
#pragma unroll
    for (int round = 0; round < 64; ++round)
#pragma unroll
        for (int k = 0; k < 96; ++k)
            asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(x[k]) : "r"(stream), "r"(warps));
    unsigned sum = shared[(threadIdx.x * 33) % 9216];
#pragma unroll
    for (int k = 0; k < 96; ++k)
        sum += x[k];
    out[threadIdx.x] = sum;
}
