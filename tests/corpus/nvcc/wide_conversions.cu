// Conversions between floating point and 64-bit integers, one after the other.

#define INTERVAL(name, type)                                                          \
    extern "C" __global__ void name(type *y, const unsigned *x, type width, type low, int count) { \
        int k = blockIdx.x * blockDim.x + threadIdx.x;                                \
        if (k < count) y[k] = (type)(x[k] * 2.3283064365386963e-10f * (float)width + (float)low); \
    }

INTERVAL(interval_s64, long long)
INTERVAL(interval_u64, unsigned long long)

#define CLAMP(name, type)                                                             \
    extern "C" __global__ void name(uchar4 *y, const float4 *x, float scale, int count) { \
        int k = blockIdx.x * blockDim.x + threadIdx.x;                                \
        if (k >= count) return;                                                       \
        float4 v = x[k];                                                              \
        type a = (type)(v.x * scale), b = (type)(v.y * scale);                        \
        type c = (type)(v.z * scale), d = (type)(v.w * scale);                        \
        a = a < 0 ? 0 : a > 255 ? 255 : a;                                            \
        b = b < 0 ? 0 : b > 255 ? 255 : b;                                            \
        c = c < 0 ? 0 : c > 255 ? 255 : c;                                            \
        d = d < 0 ? 0 : d > 255 ? 255 : d;                                            \
        y[k] = make_uchar4(a, b, c, d);                                               \
    }

CLAMP(clamp_s64, long long)

extern "C" __global__ void mean_of_wide(float *y, const long long *x, int count) {
    int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (4 * k + 3 < count) y[k] = ((float)x[4 * k] + (float)x[4 * k + 1] + (float)x[4 * k + 2] + (float)x[4 * k + 3]) * 0.25f;
}
