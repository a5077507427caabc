// Calls that stay calls: noinline functions, recursion, pointers, virtual functions, jump tables.
#include <cstdint>

__device__ __noinline__ float horner(float x, int degree)
{
    float r = 1.0f;
    for (int i = 0; i < degree; ++i)
        r = r * x + (float)i;
    return r;
}

__device__ __noinline__ void swap_pair(float *a, float *b)
{
    float t = *a;
    *a = *b;
    *b = t;
}

extern "C" __global__ void noinline_calls(float *y, const float *x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    float a = horner(x[i], 5), b = horner(x[i] * 0.5f, 7);
    if (a > b)
        swap_pair(&a, &b);
    y[i] = a - b;
}

__device__ int ackermann(int m, int n)
{
    if (m == 0)
        return n + 1;
    if (n == 0)
        return ackermann(m - 1, 1);
    return ackermann(m - 1, ackermann(m, n - 1));
}

__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }

extern "C" __global__ void recursion(int *y, const int *x)
{
    int i = threadIdx.x;
    y[i] = fibonacci(x[i] & 15) + ackermann(x[i] & 1, x[i] & 3);
}

typedef float (*Op)(float, float);
__device__ __noinline__ float add(float a, float b) { return a + b; }
__device__ __noinline__ float mul(float a, float b) { return a * b; }
__device__ __noinline__ float sub(float a, float b) { return a - b; }
__device__ Op table[3] = {add, mul, sub};

extern "C" __global__ void function_pointers(float *y, const float *x, const int *which)
{
    int i = threadIdx.x;
    y[i] = table[which[i] % 3](x[i], x[i + 1]);
}

struct Shape {
    float size;
    __device__ Shape(float s) : size(s) {}
    __device__ virtual float area() const = 0;
};
struct Square : Shape {
    __device__ Square(float s) : Shape(s) {}
    __device__ float area() const override { return size * size; }
};
struct Circle : Shape {
    __device__ Circle(float s) : Shape(s) {}
    __device__ float area() const override { return 3.14159f * size * size; }
};

extern "C" __global__ void virtual_functions(float *y, const float *x, const int *which)
{
    int i = threadIdx.x;
    Square square(x[i]);
    Circle circle(x[i]);
    const Shape *shape = which[i] ? static_cast<const Shape *>(&square) : &circle;
    y[i] = shape->area();
}

extern "C" __global__ void jump_table(float *y, const float *x, const int *which, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    float v = x[i];
    switch (which[i]) {
    case 0: v = sinf(v); break;
    case 1: v = v * v - 1.0f; break;
    case 2: v = sqrtf(v) + v; break;
    case 3: v = expf(v); break;
    case 4: v = 1.0f / v; y[n + i] = v; break;
    case 5: v = v > 0 ? v : -v; __syncwarp(__activemask()); break;
    case 6: v = log2f(v); break;
    case 7: for (int k = 0; k < 4; ++k) v = v * v + x[(i + k) % n]; break;
    case 8: v = tanhf(v); break;
    case 9: v = fmodf(v, 0.3f); break;
    case 10: v += 11.0f; atomicAdd(y, v); break;
    case 11: return;
    }
    y[i] = v;
}

extern "C" __global__ void interpreter(int *y, const uint8_t *code, int length)
{
    int a = threadIdx.x, b = blockIdx.x, stack[8], top = 0;
    for (int pc = 0; pc < length;) {
        switch (code[pc++]) {
        case 0: a += b; break;
        case 1: a -= b; break;
        case 2: a *= 3; break;
        case 3: b ^= a; break;
        case 4: stack[top++ & 7] = a; break;
        case 5: a = stack[--top & 7]; break;
        case 6: if (a & 1) pc += code[pc]; break;
        case 7: b = __popc(a); break;
        case 8: a = __brev(b); break;
        case 9: length = 0; break;
        }
    }
    y[blockIdx.x * blockDim.x + threadIdx.x] = a + b;
}
