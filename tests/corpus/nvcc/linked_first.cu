// Linked with linked_second.cu: each file has a local function for 64-bit division of one name.

extern "C" __global__ void first(unsigned long long* a, unsigned long long b) {
    a[threadIdx.x] = a[threadIdx.x] / b;
}
