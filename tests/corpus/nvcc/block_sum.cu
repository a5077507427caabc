// Something small for architectures that are to be refused.
extern "C" __global__ void block_sum(float *y, const float *x)
{
    float v = x[blockIdx.x * 32 + threadIdx.x];
    for (int d = 16; d; d /= 2)
        v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x == 0)
        y[blockIdx.x] = v;
}
