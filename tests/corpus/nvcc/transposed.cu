// Transposed matrix tiles in registers, whose results return in the order of shared loads.

__device__ __forceinline__ unsigned transposed(unsigned tile) {
    unsigned result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(tile));
    return result;
}

extern "C" __global__ void two_tiles(const unsigned* x, unsigned* y) {
    unsigned tile = x[threadIdx.x];
    unsigned first = transposed(tile);
    unsigned second = transposed(tile + 1);
    y[threadIdx.x] = first + second;
}

extern "C" __global__ void tile_and_load(const unsigned* x, unsigned* y) {
    __shared__ unsigned loaded[256];
    unsigned tile = x[threadIdx.x];
    loaded[threadIdx.x ^ 1] = tile;
    __syncthreads();
    unsigned first = transposed(tile);
    y[threadIdx.x] = loaded[threadIdx.x];
    y[threadIdx.x + 256] = first;
}
