// Whole algorithms with shared memory: matrix product, scan, sort, FFT, stencil, layer norm, softmax.

constexpr int T = 64, K = 16;

// y = a @ b, fp32, 64 x 64 tiles, 256 threads with 4 x 4 values each, two buffers.
extern "C" __global__ void __launch_bounds__(256)
sgemm(float *__restrict__ y, const float *__restrict__ a, const float *__restrict__ b, int n)
{
    __shared__ float sa[2][K][T + 4], sb[2][K][T];
    int t = threadIdx.x, row = blockIdx.y * T, column = blockIdx.x * T;
    int ar = t / 4, ak = t % 4 * 4, bk = t / 16, bc = t % 16 * 4, ty = t / 16 * 4, tx = t % 16 * 4;
    float acc[4][4] = {};
    float4 u = *(const float4 *)(a + (row + ar) * n + ak);
    float4 v = *(const float4 *)(b + bk * n + column + bc);
    for (int k = 0, s = 0; k < n; k += K, s ^= 1) {
        sa[s][ak][ar] = u.x;
        sa[s][ak + 1][ar] = u.y;
        sa[s][ak + 2][ar] = u.z;
        sa[s][ak + 3][ar] = u.w;
        *(float4 *)&sb[s][bk][bc] = v;
        __syncthreads();
        if (k + K < n) {
            u = *(const float4 *)(a + (row + ar) * n + k + K + ak);
            v = *(const float4 *)(b + (k + K + bk) * n + column + bc);
        }
#pragma unroll
        for (int p = 0; p < K; ++p) {
            float x[4], z[4];
            *(float4 *)x = *(float4 *)&sa[s][p][ty];
            *(float4 *)z = *(float4 *)&sb[s][p][tx];
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    acc[i][j] += x[i] * z[j];
        }
    }
    for (int i = 0; i < 4; ++i)
        *(float4 *)(y + (row + ty + i) * n + column + tx) = *(float4 *)acc[i];
}

extern "C" __global__ void inclusive_scan(int *y, const int *x)
{
    __shared__ int warps[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, v = x[blockIdx.x * blockDim.x + threadIdx.x];
    for (int d = 1; d < 32; d *= 2) {
        int u = __shfl_up_sync(~0u, v, d);
        if (lane >= d)
            v += u;
    }
    if (lane == 31)
        warps[warp] = v;
    __syncthreads();
    if (warp == 0) {
        int w = lane < blockDim.x / 32 ? warps[lane] : 0;
        for (int d = 1; d < 32; d *= 2) {
            int u = __shfl_up_sync(~0u, w, d);
            if (lane >= d)
                w += u;
        }
        warps[lane] = w;
    }
    __syncthreads();
    y[blockIdx.x * blockDim.x + threadIdx.x] = v + (warp ? warps[warp - 1] : 0);
}

extern "C" __global__ void bitonic_sort(unsigned *x)
{
    __shared__ unsigned box[1024];
    for (int i = threadIdx.x; i < 1024; i += blockDim.x)
        box[i] = x[blockIdx.x * 1024 + i];
    for (int k = 2; k <= 1024; k *= 2)
        for (int j = k / 2; j > 0; j /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < 1024; i += blockDim.x) {
                int other = i ^ j;
                if (other > i && (box[i] > box[other]) == ((i & k) == 0)) {
                    unsigned t = box[i];
                    box[i] = box[other];
                    box[other] = t;
                }
            }
        }
    __syncthreads();
    for (int i = threadIdx.x; i < 1024; i += blockDim.x)
        x[blockIdx.x * 1024 + i] = box[i];
}

extern "C" __global__ void fft_64(float2 *x)
{
    __shared__ float2 box[64];
    int i = threadIdx.x;
    box[i] = x[blockIdx.x * 64 + (__brev(i) >> 26)];
    __syncthreads();
    for (int half = 1; half < 64; half *= 2) {
        int place = i / half * 2 * half + i % half;
        float2 a, b;
        if (i < 32) {
            float s, c;
            sincospif(-(float)(i % half) / half, &s, &c);
            a = box[place];
            b = box[place + half];
            b = make_float2(b.x * c - b.y * s, b.x * s + b.y * c);
        }
        __syncthreads();
        if (i < 32) {
            box[place] = make_float2(a.x + b.x, a.y + b.y);
            box[place + half] = make_float2(a.x - b.x, a.y - b.y);
        }
        __syncthreads();
    }
    x[blockIdx.x * 64 + i] = box[i];
}

extern "C" __global__ void stencil_7(float *y, const float *x, int nx, int ny, int nz)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y * blockDim.y + threadIdx.y;
    if (i < 1 || i >= nx - 1 || j < 1 || j >= ny - 1)
        return;
    int plane = nx * ny, p = j * nx + i;
    float below = x[p], here = x[p + plane];
    for (int k = 1; k < nz - 1; ++k) {
        int q = k * plane + p;
        float above = x[q + plane];
        y[q] = 0.4f * here + 0.1f * (below + above + x[q - 1] + x[q + 1] + x[q - nx] + x[q + nx]);
        below = here;
        here = above;
    }
}

extern "C" __global__ void layer_norm(float *y, const float *x, const float *w, int n)
{
    __shared__ float2 part[8];
    const float *row = x + (size_t)blockIdx.x * n;
    float s = 0.0f, q = 0.0f;
    for (int i = threadIdx.x; i < n; i += 256) {
        float v = row[i];
        s += v;
        q += v * v;
    }
    for (int d = 16; d; d /= 2) {
        s += __shfl_xor_sync(~0u, s, d);
        q += __shfl_xor_sync(~0u, q, d);
    }
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = make_float2(s, q);
    __syncthreads();
    s = q = 0.0f;
    for (int k = 0; k < 8; ++k) {
        s += part[k].x;
        q += part[k].y;
    }
    float mean = s / n, scale = rsqrtf(q / n - mean * mean + 1e-5f);
    for (int i = threadIdx.x; i < n; i += 256)
        y[(size_t)blockIdx.x * n + i] = (row[i] - mean) * scale * w[i];
}
