// 64-bit divisions by constants: wide products whose carry is read at once, as index arithmetic of
// libraries has them.

typedef unsigned long long u64;

#define DIVIDE(name, divisor)                                                     \
    extern "C" __global__ void name(u64 *out, const u64 *in, u64 count) {         \
        u64 step = gridDim.x * (u64)blockDim.x;                                   \
        for (u64 k = blockIdx.x * (u64)blockDim.x + threadIdx.x; k < count; k += step) \
            out[k / divisor] = in[k % divisor] + in[k] / divisor;                 \
    }

DIVIDE(divide_by_3, 3ull)
DIVIDE(divide_by_5, 5ull)
DIVIDE(divide_by_7, 7ull)
DIVIDE(divide_by_10, 10ull)
DIVIDE(divide_by_100, 100ull)
DIVIDE(divide_by_1000003, 1000003ull)
DIVIDE(divide_by_max, 0xffffffffull)

#define CONVERT(name, type)                                                       \
    extern "C" __global__ void name(float *out, const type *in, type scale, int count) { \
        int k = blockIdx.x * blockDim.x + threadIdx.x;                            \
        if (k < count) out[k] = in[k] * (float)scale;                             \
    }

CONVERT(convert_u8, unsigned char)
CONVERT(convert_u16, unsigned short)
CONVERT(convert_s8, signed char)
CONVERT(convert_s16, short)
CONVERT(convert_u32, unsigned)
