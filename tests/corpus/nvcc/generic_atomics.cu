// Atomics by a generic pointer whose old value is used: ATOM has a predicate and a register, and from
// sm_90 on the read scoreboard announces the predicate.

#include <cuda_fp16.h>

template <class T>
__device__ __forceinline__ T* either(T* global, T* shared, int n) {
    return n & 1 ? shared + (n & 7) : global;
}

#define ADD(T, NAME)                                                                           \
    extern "C" __global__ void NAME(T* y, const T* x, int n) {                                 \
        __shared__ T s[9];                                                                     \
        if (threadIdx.x < 9) s[threadIdx.x] = x[0];                                            \
        __syncthreads();                                                                       \
        T* p = either(y, s, n);                                                                \
        T old = atomicAdd(p, x[threadIdx.x]);                                                  \
        __syncthreads();                                                                       \
        y[9 + threadIdx.x] = old + s[0];                                                       \
    }
ADD(float, add_float) ADD(unsigned long long, add_long) ADD(__half2, add_half2)

extern "C" __global__ void add_in_loop(float* y, const float* x, int n) {
    __shared__ float s[9];
    if (threadIdx.x < 9) s[threadIdx.x] = 0;
    __syncthreads();
    float sum = 0;
    for (int k = 0; k < n; ++k) sum += atomicAdd(either(y, s, k), x[k] * sum);
    y[99 + threadIdx.x] = sum;
}

extern "C" __global__ void several(unsigned long long* y, const unsigned long long* x, int n) {
    __shared__ unsigned long long s[9];
    if (threadIdx.x < 9) s[threadIdx.x] = 0;
    __syncthreads();
    unsigned long long* p = either(y, s, n);
    unsigned long long old = atomicAdd(p, x[threadIdx.x]);
    old += atomicCAS(p, old, 3ull);
    old ^= atomicMax(p, old);
    old += atomicExch(p + 1, old);
    y[9 + threadIdx.x] = old + s[0];
}
