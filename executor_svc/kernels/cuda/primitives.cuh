/* What the kernels need of the GPU beyond plain C: 16-byte accesses, conversions, shuffles and the tensor cores.
 *
 * emulation/emulation.h has the same functions for a CPU. HALF_TYPE is bf16 or fp16: an element of the pool, of queries
 * and of values, carried in 16 bits; a `u32` holds two, the first in the low half.
 */
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define WARP 32
#define ALL_LANES 0xffffffffu
#define NEVER __int_as_float(0xff800000) /* minus infinity */

/* 16 aligned bytes that nobody writes while the kernel runs and that no other thread will want again. */
__device__ __forceinline__ uint4 load16_once(const void *from) {
    uint4 x;
    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}

__device__ __forceinline__ uint4 load16(const void *from) { return *(const uint4 *)from; }

__device__ __forceinline__ void store16(void *to, uint4 x) { *(uint4 *)to = x; }

__device__ __forceinline__ float shuffle(float x, int lane) { return __shfl_sync(ALL_LANES, x, lane); }

__device__ __forceinline__ float shuffle_xor(float x, int mask) { return __shfl_xor_sync(ALL_LANES, x, mask); }

/* 2^x, to 2 units in the last place. */
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The low halves of two words, and their high halves: the first word's half comes first. */
__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

#ifdef ELEMENT_BF16
#define MMA_TYPES "f32.bf16.bf16.f32"
__device__ __forceinline__ u32 pack(float first, float second) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
    return x;
}
__device__ __forceinline__ float first_of(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float second_of(u32 x) { return __uint_as_float(x & 0xffff0000u); }
#else
#define MMA_TYPES "f32.f16.f16.f32"
__device__ __forceinline__ u32 pack(float first, float second) {
    u32 x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
    return x;
}
__device__ __forceinline__ float half_bits(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ float first_of(u32 x) { return half_bits((u16)(x & 0xffffu)); }
__device__ __forceinline__ float second_of(u32 x) { return half_bits((u16)(x >> 16)); }
#endif

/* c += a b for a [16, 16], b [16, 8], over the lanes of a warp. With g = lane / 4 and t = lane % 4 a lane has
 *   a0, a1, a2, a3: rows g, g + 8, g, g + 8 of columns (2t, 2t + 1), twice, then of (2t + 8, 2t + 9), twice;
 *   b0, b1: rows (2t, 2t + 1) and (2t + 8, 2t + 9) of column g;
 *   c[0], c[1]: row g, columns 2t and 2t + 1; c[2], c[3]: row g + 8. */
__device__ __forceinline__ void mma(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col." MMA_TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
