// Warps take work from a queue.  ptxas leaves a MOV that control does not reach, on sm_80 to sm_89.

extern "C" __global__ void work_queue(int* head, int* tail, int* queue, int* out, int least) {
    while (true) {
        int i = -1;
        if ((threadIdx.x & 31) == 0) i = atomicAdd(head, 1);
        i = __shfl_sync(~0u, i, 0);
        if (i >= *(volatile int*)tail) break;
        int value = queue[i];
        if (value > least && (threadIdx.x & 31) == 0) {
            int k = atomicAdd(tail, 2);
            queue[k] = value / 2;
            queue[k + 1] = value - value / 2;
            __threadfence();
        }
        out[i * 32 + (threadIdx.x & 31)] = value * threadIdx.x;
    }
}
