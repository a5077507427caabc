// Matrix product in fp32: c = a @ b, (m, k) by (k, n), row-major; sizes are multiples of the tiles.
// 64 x 64 tiles of c, 16 columns of a in shared memory, 256 threads with 4 x 4 results each.

constexpr int TILE = 64;
constexpr int DEPTH = 16;

extern "C" __global__ void __launch_bounds__(256)
sgemm(float *__restrict__ c, const float *__restrict__ a, const float *__restrict__ b, int m, int n,
      int k)
{
    __shared__ float a_tile[DEPTH][TILE + 4];
    __shared__ float b_tile[DEPTH][TILE];
    int row = blockIdx.y * TILE, column = blockIdx.x * TILE;
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float sum[4][4] = {};
    for (int start = 0; start < k; start += DEPTH) {
        float4 from_a = *reinterpret_cast<const float4 *>(
            &a[(size_t)(row + threadIdx.x / 4) * k + start + threadIdx.x % 4 * 4]);
        float4 from_b =
            *reinterpret_cast<const float4 *>(&b[(size_t)(start + y) * n + column + x * 4]);
        a_tile[threadIdx.x % 4 * 4 + 0][threadIdx.x / 4] = from_a.x;
        a_tile[threadIdx.x % 4 * 4 + 1][threadIdx.x / 4] = from_a.y;
        a_tile[threadIdx.x % 4 * 4 + 2][threadIdx.x / 4] = from_a.z;
        a_tile[threadIdx.x % 4 * 4 + 3][threadIdx.x / 4] = from_a.w;
        *reinterpret_cast<float4 *>(&b_tile[y][x * 4]) = from_b;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            float4 u = *reinterpret_cast<const float4 *>(&a_tile[i][y * 4]);
            float4 v = *reinterpret_cast<const float4 *>(&b_tile[i][x * 4]);
            const float left[4] = {u.x, u.y, u.z, u.w}, right[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int s = 0; s < 4; ++s)
                    sum[r][s] += left[r] * right[s];
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 4; ++r)
        *reinterpret_cast<float4 *>(&c[(size_t)(row + y * 4 + r) * n + column + x * 4]) =
            make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}
