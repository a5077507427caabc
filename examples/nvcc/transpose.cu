// Matrix transpose through shared memory: y[c][r] = x[r][c], fp32.
// 32 x 32 tiles, 32 x 8 threads; the padding column keeps the shared reads free of bank conflicts.

constexpr int TILE = 32;
constexpr int STEP = 8;

extern "C" __global__ void __launch_bounds__(TILE * STEP)
transpose(float *__restrict__ y, const float *__restrict__ x, int rows, int columns)
{
    __shared__ float tile[TILE][TILE + 1];
    int column = blockIdx.x * TILE + threadIdx.x;
    int row = blockIdx.y * TILE + threadIdx.y;
#pragma unroll
    for (int i = 0; i < TILE; i += STEP)
        if (row + i < rows && column < columns)
            tile[threadIdx.y + i][threadIdx.x] = x[(size_t)(row + i) * columns + column];
    __syncthreads();
    column = blockIdx.y * TILE + threadIdx.x;
    row = blockIdx.x * TILE + threadIdx.y;
#pragma unroll
    for (int i = 0; i < TILE; i += STEP)
        if (row + i < columns && column < rows)
            y[(size_t)(row + i) * rows + column] = tile[threadIdx.x][threadIdx.y + i];
}
