// Softmax of each row, fp32: one block of 256 threads a row, one pass for maximum and sum, one to
// write; columns are a multiple of 4.

constexpr int THREADS = 256;

struct Part {
    float high;
    float total;
};

__device__ __forceinline__ Part merge(Part a, Part b)
{
    float high = fmaxf(a.high, b.high);
    return {high, a.total * __expf(a.high - high) + b.total * __expf(b.high - high)};
}

__device__ __forceinline__ Part merge_warp(Part part)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        Part other = {__shfl_xor_sync(0xffffffffu, part.high, distance),
                      __shfl_xor_sync(0xffffffffu, part.total, distance)};
        part = merge(part, other);
    }
    return part;
}

extern "C" __global__ void __launch_bounds__(THREADS)
row_softmax(float *__restrict__ y, const float *__restrict__ x, int columns)
{
    __shared__ Part parts[THREADS / 32];
    const float4 *from = reinterpret_cast<const float4 *>(x + (size_t)blockIdx.x * columns);
    float4 *to = reinterpret_cast<float4 *>(y + (size_t)blockIdx.x * columns);
    Part part = {-1e30f, 0.0f};
#pragma unroll 2
    for (int i = threadIdx.x; i < columns / 4; i += THREADS) {
        float4 v = from[i];
        float high = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
        float total = __expf(v.x - high) + __expf(v.y - high) + __expf(v.z - high) +
                      __expf(v.w - high);
        part = merge(part, {high, total});
    }
    part = merge_warp(part);
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = part;
    __syncthreads();
    part = parts[threadIdx.x % (THREADS / 32)];
    // Eight parts, four times in a warp: the distances 1, 2 and 4 merge each of them once.
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) {
        Part other = {__shfl_xor_sync(0xffffffffu, part.high, distance),
                      __shfl_xor_sync(0xffffffffu, part.total, distance)};
        part = merge(part, other);
    }
    float inverse = 1.0f / part.total;
#pragma unroll 2
    for (int i = threadIdx.x; i < columns / 4; i += THREADS) {
        float4 v = from[i];
        to[i] = make_float4(__expf(v.x - part.high) * inverse, __expf(v.y - part.high) * inverse,
                            __expf(v.z - part.high) * inverse, __expf(v.w - part.high) * inverse);
    }
}
