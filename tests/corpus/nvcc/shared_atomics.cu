// Shared memory added to global memory: each atomic access waits for its own shared load.

extern "C" __global__ void add_counts(const unsigned* counted, unsigned* total, int values) {
    __shared__ unsigned counts[1024];
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < values; i += blockDim.x) atomicAdd(&counts[counted[i] & 1023], 1);
    __syncthreads();
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) atomicAdd(total + i, counts[i]);
}
