/* A small vector layer: one width per instruction set, chosen by the build with -DISA_AVX512, -DISA_AVX2 or nothing.
 *
 * vf is a vector of VW floats, vi one of as many int32. Products are fused only where v_fma says so (the build turns
 * contraction off), so that one row's bits never depend on how the compiler unrolled the code around it.
 */
#ifndef JITNEY_VEC_H
#define JITNEY_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(ISA_AVX512) || defined(ISA_AVX2)
#include <immintrin.h>
#endif

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(f) JOIN(f, ISA)
#define INLINE static inline __attribute__((always_inline))
#define ONCE static __attribute__((noinline)) /* large, and called from several places */

#if defined(ISA_AVX512)
#define VW 16
#define VN 4 /* vectors beside each other in a register tile: VN * 6 accumulators and VN operands */
#elif defined(ISA_AVX2)
#define VW 8
#define VN 2
#else
#define VW 4
#define VN 2
#endif

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4))); /* for sums that may wrap */
typedef float vf_any __attribute__((vector_size(VW * 4), aligned(4), may_alias));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE vf v_load(const float *p) { return *(const vf_any *)p; }
INLINE void v_store(float *p, vf v) { *(vf_any *)p = v; }
INLINE vf v_set(float x) { return x - (vf){0}; }
INLINE vi v_set_int(int32_t x) { return x - (vi){0}; }

INLINE vi v_lanes(void) {
#if VW == 16
    return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif VW == 8
    return (vi){0, 1, 2, 3, 4, 5, 6, 7};
#else
    return (vi){0, 1, 2, 3};
#endif
}

/* mask: -1 takes a, 0 takes b */
INLINE vf v_pick(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
/* The larger one; b where one of them is NaN. */
INLINE vf v_max(vf a, vf b) {
#if defined(ISA_AVX512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(ISA_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return v_pick(a > b, a, b);
#endif
}

INLINE vf v_fma(vf a, vf b, vf c) {
#if defined(ISA_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(ISA_AVX2)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* Sums and maxima over lanes, by halves. */
INLINE float v_sum(vf v) {
#if defined(ISA_AVX512) || defined(ISA_AVX2)
#if defined(ISA_AVX512)
    __m256 x = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
    __m256 x = (__m256)v;
#endif
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

INLINE float v_top(vf v) {
#if defined(ISA_AVX512) || defined(ISA_AVX2)
#if defined(ISA_AVX512)
    __m256 x = _mm256_max_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
    __m256 x = (__m256)v;
#endif
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
#endif
}

/* 2^x for x <= 126, within 2 units in the last place; below -126 something smaller than 2^-126. NaN stays NaN. Minimax
 * polynomial of 2^f on [-0.5, 0.5], times 2 to the integer part; where there is no instruction for that, the rounding
 * constant leaves the integer part in the low bits of the sum. */
INLINE vf v_exp2(vf x) {
#if defined(ISA_AVX512)
    x = v_max(v_set(-200.0f), x);
    vf whole = (vf)_mm512_roundscale_ps((__m512)x, 0), f = x - whole;
#else
    const vf magic = v_set(12582912.0f);
    vf shifted = x + magic;
    vf f = x - (shifted - magic);
#endif
    vf p = v_set(1.535336196e-4f);
    p = v_fma(p, f, v_set(1.339887385e-3f));
    p = v_fma(p, f, v_set(9.618436918e-3f));
    p = v_fma(p, f, v_set(5.550332367e-2f));
    p = v_fma(p, f, v_set(2.402264774e-1f));
    p = v_fma(p, f, v_set(6.931471825e-1f));
    p = v_fma(p, f, v_set(1.0f));
#if defined(ISA_AVX512)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    vf scaled = (vf)((vu)p + ((vu)shifted << 23));
    vf result = v_pick(x != x, x, scaled);
    return (vf)((vi)result & ~(x < v_set(-126.0f)));
#endif
}

/* Half precision, IEEE, to nearest even. */
INLINE float half_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f; /* moves the exponent's bias; exact, subnormal numbers too */
    memcpy(&bits, &value, 4);
    bits |= ((h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u) | sign;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint16_t float_to_half(float value) {
    uint32_t bits, sign, rounded;
    memcpy(&bits, &value, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (bits >> 13 & 0x3ff)); /* NaN, made quiet */
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);                       /* rounds to 65536 or more */
    if (bits < 0x38800000) {                                                        /* below 2^-14: steps of 2^-24 */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&rounded, &magnitude, 4);
        return (uint16_t)(sign | (rounded - 0x3f000000));
    }
    rounded = bits + 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | ((rounded - 0x38000000) >> 13));
}

INLINE vf v_load_half(const uint16_t *p) {
#if defined(ISA_AVX512)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(ISA_AVX2)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    return (vf){half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
#endif
}

#if defined(ISA_AVX512)
/* Eight from each place. */
INLINE vf v_load_half_pair(const uint16_t *a, const uint16_t *b) {
    __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a));
    return (vf)_mm512_cvtph_ps(_mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i *)b), 1));
}
#endif

INLINE void v_store_half(uint16_t *p, vf v) {
#if defined(ISA_AVX512)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(ISA_AVX2)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < VW; i++) p[i] = float_to_half(v[i]);
#endif
}

#endif
