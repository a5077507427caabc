// sm_120a: matrix instructions with a scale for each block of 32 values; packed fp32 arithmetic.
#include <cstdint>

extern "C" __global__ void mma_block_scaled(float *y, const uint32_t *x)
{
    int lane = threadIdx.x;
    float c[4] = {};
    for (int k = 0; k < 4; ++k) {
        const uint32_t *p = x + k * 256 + lane;
        asm volatile("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32"
                     ".ue8m0 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%12,%12}, {%11}, {%12,%12};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(p[0]), "r"(p[32]), "r"(p[64]), "r"(p[96]), "r"(p[128]), "r"(p[160]), "r"(p[192]),
                       "r"(p[224]), "h"((uint16_t)0));
    }
    *(float4 *)(y + lane * 4) = make_float4(c[0], c[1], c[2], c[3]);
}
