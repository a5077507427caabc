// Saturating conversions between integers, packed in one word, and 64-bit remainders by constants.

typedef unsigned long long u64;

#define SATURATE(name, type, ptx)                                                      \
    extern "C" __global__ void name(unsigned *out, const int *in, int count) {         \
        int k = blockIdx.x * blockDim.x + threadIdx.x;                                 \
        if (k >= count) return;                                                        \
        type low, high;                                                                \
        int first = in[2 * k] * 3 + k, second = in[2 * k + 1] - (first >> 3);          \
        asm("cvt.sat." ptx ".s32 %0, %1;" : "=h"(low) : "r"(first));                   \
        asm("cvt.sat." ptx ".s32 %0, %1;" : "=h"(high) : "r"(second));                 \
        out[k] = (unsigned)(unsigned short)low << 16 | (unsigned short)high;           \
    }

SATURATE(saturate_u8, unsigned short, "u8")
SATURATE(saturate_s8, short, "s8")
SATURATE(saturate_u16, unsigned short, "u16")
SATURATE(saturate_s16, short, "s16")

#define REMAINDER(divisor)                                                             \
    extern "C" __global__ void remainder_by_##divisor(u64 *out, const u64 *in, u64 count) { \
        u64 k = blockIdx.x * (u64)blockDim.x + threadIdx.x;                            \
        if (k < count) out[k / divisor##ull] = in[k] % divisor##ull;                   \
    }

REMAINDER(6)
REMAINDER(9)
REMAINDER(12)
REMAINDER(15)
REMAINDER(25)
REMAINDER(60)
REMAINDER(1000)
