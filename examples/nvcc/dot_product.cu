// Dot products of the rows of two matrices: y[r] = sum_c a[r][c] * b[r][c], fp32.
// One block a row; a grid of rows, 256 threads, 16-byte loads, shuffles inside a warp and shared
// memory between warps.  columns is a multiple of 4.

constexpr int THREADS = 256;

__device__ __forceinline__ float warp_sum(float v)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, distance);
    return v;
}

extern "C" __global__ void __launch_bounds__(THREADS)
dot_product(float *__restrict__ y, const float *__restrict__ a, const float *__restrict__ b,
            int columns)
{
    __shared__ float partial[THREADS / 32];
    const float4 *a4 = reinterpret_cast<const float4 *>(a + (size_t)blockIdx.x * columns);
    const float4 *b4 = reinterpret_cast<const float4 *>(b + (size_t)blockIdx.x * columns);
    float sum = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < columns / 4; i += THREADS) {
        float4 u = a4[i];
        float4 v = b4[i];
        sum += u.x * v.x + u.y * v.y + u.z * v.z + u.w * v.w;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < THREADS / 32 ? partial[threadIdx.x] : 0.0f;
        sum = warp_sum(sum);
        if (threadIdx.x == 0)
            y[blockIdx.x] = sum;
    }
}
