// See linked_first.cu.

extern "C" __global__ void second(unsigned long long* a, unsigned long long b) {
    a[threadIdx.x] = a[threadIdx.x] / (b + a[1]);
}
