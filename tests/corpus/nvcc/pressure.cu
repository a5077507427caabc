// Register pressure: a product with a large register tile; kernels that hold a row in registers.

template <int M, int N>
__device__ __forceinline__ void outer(float *__restrict__ c, const float *__restrict__ a,
                                      const float *__restrict__ b, int k, int stride)
{
    float acc[M][N] = {}, x[M], y[N];
    int i = threadIdx.x;
    for (int p = 0; p < k; ++p) {
#pragma unroll
        for (int m = 0; m < M; ++m)
            x[m] = a[(p * M + m) * stride + i];
#pragma unroll
        for (int n = 0; n < N; ++n)
            y[n] = b[(p * N + n) * stride + i];
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
                acc[m][n] += x[m] * y[n];
    }
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
            c[(m * N + n) * stride + i] = acc[m][n];
}

extern "C" __global__ void tile_6x6(float *c, const float *a, const float *b, int k, int s) { outer<6, 6>(c, a, b, k, s); }
extern "C" __global__ void tile_14x14(float *c, const float *a, const float *b, int k, int s) { outer<14, 14>(c, a, b, k, s); }

extern "C" __global__ void row_in_registers(float *y, const float *x, float scale)
{
    float v[64];
#pragma unroll
    for (int k = 0; k < 64; ++k)
        v[k] = x[k * 256 + threadIdx.x];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 64; ++k)
        sum += v[k] * v[63 - k];
#pragma unroll
    for (int k = 0; k < 64; ++k)
        y[k * 256 + threadIdx.x] = v[k] * sum + scale;
}
