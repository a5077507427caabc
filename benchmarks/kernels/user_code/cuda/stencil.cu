// A step of the 25-point stencil of the wave equation (eighth order), fp32, on an n x n x n grid.
// 32 x 8 tiles of a plane in shared memory; the planes before and behind are in registers.

constexpr int X = 32;
constexpr int Y = 8;
constexpr int R = 4;

extern "C" __global__ void __launch_bounds__(X * Y)
stencil(float *__restrict__ next, const float *__restrict__ now, const float *__restrict__ before,
        int n, int depth)
{
    constexpr float W[R + 1] = {-2.847222f, 1.6f, -0.2f, 0.02539683f, -0.001785714f};
    __shared__ float plane[Y + 2 * R][X + 2 * R];
    int x = blockIdx.x * X + threadIdx.x + R, y = blockIdx.y * Y + threadIdx.y + R;
    int first = blockIdx.z * depth + R;
    size_t step = (size_t)n * n, place = (size_t)first * step + (size_t)y * n + x;
    float column[2 * R + 1];
#pragma unroll
    for (int i = 0; i < 2 * R; ++i)
        column[i + 1] = now[place + (size_t)i * step - R * step];
    for (int z = first; z < min(first + depth, n - R); ++z, place += step) {
#pragma unroll
        for (int i = 0; i < 2 * R; ++i)
            column[i] = column[i + 1];
        column[2 * R] = now[place + R * step];
        __syncthreads();
        plane[threadIdx.y + R][threadIdx.x + R] = column[R];
        if (threadIdx.y < R) {
            plane[threadIdx.y][threadIdx.x + R] = now[place - R * n];
            plane[threadIdx.y + Y + R][threadIdx.x + R] = now[place + Y * n];
        }
        if (threadIdx.x < R) {
            plane[threadIdx.y + R][threadIdx.x] = now[place - R];
            plane[threadIdx.y + R][threadIdx.x + X + R] = now[place + X];
        }
        __syncthreads();
        float sum = 3.0f * W[0] * column[R];
#pragma unroll
        for (int i = 1; i <= R; ++i)
            sum += W[i] * (column[R - i] + column[R + i] +
                           plane[threadIdx.y + R - i][threadIdx.x + R] +
                           plane[threadIdx.y + R + i][threadIdx.x + R] +
                           plane[threadIdx.y + R][threadIdx.x + R - i] +
                           plane[threadIdx.y + R][threadIdx.x + R + i]);
        next[place] = 2.0f * column[R] - before[place] + 0.1f * sum;
    }
}
