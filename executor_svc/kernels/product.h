/* Register tiles of a product: some rows of x times one panel of packed weights.
 *
 * Weights lie in panels of PANEL outputs, the last one filled up with zeros.
 *   HALF: half precision, packed[panel][input][PANEL]. An output is one chain of fused products over the inputs, from
 *         first to last.
 *   INT8: packed[panel][pair of inputs][PANEL][2], with a scale in half precision for each output and each GROUP of
 *         inputs, scales[panel][group][PANEL]. Rows of x are int16 with one scale each. Products of a group are summed
 *         exactly, as int32: 64 * 127 * 32,767 is 2^28. An output is one chain of fused products of sums and scales.
 * How many rows share a register tile changes nothing of an output; so any number of rows gives the same bits.
 */
#ifndef JITNEY_PRODUCT_H
#define JITNEY_PRODUCT_H

#include <stdint.h>

#include "vec.h"

#if defined(ISA_AVX512)
#define TILE_ROWS 12 /* rows of a register tile: with 2 vectors of a panel, 24 of 32 registers hold sums */
#else
#define TILE_ROWS 6
#endif
#define PANEL_VECTORS 2
#define STREAMS 3 /* panels that few rows pass by together: memory gives a seventh more where it is read at several places */
#define PANEL (PANEL_VECTORS * VW)
#define GROUP 64          /* inputs that share a scale */
#define GROUP_PAIRS (GROUP / 2)
#define AHEAD_BYTES 4096  /* of a panel that are asked for before they are needed */
#define STREAM_AHEAD_BYTES 1024 /* of each of the next panels, where several are read */
#define LINE 64           /* bytes of the cache */
#define LARGEST_INT16 32767.0f

enum { HALF, INT8 };

/* One layer. `bias` may be null; `scales` is for INT8. */
typedef struct {
    const void *packed;
    const uint16_t *scales;
    const float *bias;
    int64_t inputs, outputs, kind;
} Matrix;

/* Rows that are multiplied: `x` for HALF, `quantised` and `scale` (one a row) for INT8. Strides are elements. */
typedef struct {
    const float *x;
    const int16_t *quantised;
    const float *scale;
    int64_t stride;
} Operand;

INLINE int64_t pairs_of(int64_t inputs) { return (inputs + 1) / 2; }
INLINE int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }
INLINE int64_t panel_bytes(const Matrix *m) { return (m->kind == HALF ? m->inputs : pairs_of(m->inputs)) * 2 * PANEL; }
INLINE const char *panel_of(const Matrix *m, int64_t panel) { return (const char *)m->packed + panel * panel_bytes(m); }

/* tile[row][PANEL] = rows of x times a panel. The first tile of a panel asks for what comes next, `next` behind its end. */
INLINE void multiply_half(const Matrix *m, int64_t panel, const Operand *x, int64_t first, float *tile, int rows,
                          const char *next) {
    const uint16_t *weights = (const uint16_t *)panel_of(m, panel);
    const float *from = x->x + first * x->stride;
    int64_t stride = x->stride, inputs = m->inputs, whole = inputs - AHEAD_BYTES / (2 * PANEL);
    vf sums[TILE_ROWS][PANEL_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < PANEL_VECTORS; j++) sums[r][j] = v_set(0.0f);
    const char *ahead = whole > 0 ? (const char *)weights + AHEAD_BYTES : next;
    for (int64_t i = 0; i < inputs; i++, weights += PANEL, ahead += 2 * PANEL) {
        vf w[PANEL_VECTORS];
        if (i == whole) ahead = next;
        for (int j = 0; j < 2 * PANEL; j += LINE) __builtin_prefetch(ahead + j, 0, 3);
        for (int j = 0; j < PANEL_VECTORS; j++) w[j] = v_load_half(weights + j * VW);
        for (int r = 0; r < rows; r++) {
            vf a = v_set(from[r * stride + i]);
            for (int j = 0; j < PANEL_VECTORS; j++) sums[r][j] = v_fma(a, w[j], sums[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < PANEL_VECTORS; j++) v_store(tile + r * PANEL + j * VW, sums[r][j]);
}

/* At input (or pair) i: asks for the beginning of the panels that come next, side by side from `next` on. */
INLINE void prefetch_streams(const Matrix *m, const char *next, int64_t i, int64_t inputs) {
    int64_t at = i * 2 * PANEL - (inputs * 2 * PANEL - STREAM_AHEAD_BYTES);
    if (at < 0) return;
    for (int s = 0; s < STREAMS; s++)
        for (int j = 0; j < 2 * PANEL; j += LINE) __builtin_prefetch(next + s * panel_bytes(m) + at + j, 0, 3);
}

/* The same as multiply_half for STREAMS panels from `panel` on and the first `rows` rows, which are few. */
INLINE void multiply_half_streams(const Matrix *m, int64_t panel, const Operand *x, float tiles[STREAMS][TILE_ROWS * PANEL],
                                  int rows, const char *next) {
    const uint16_t *weights = (const uint16_t *)panel_of(m, panel);
    int64_t apart = m->inputs * PANEL;
    vf sums[STREAMS][TILE_ROWS / STREAMS][PANEL_VECTORS];
    for (int s = 0; s < STREAMS; s++)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < PANEL_VECTORS; j++) sums[s][r][j] = v_set(0.0f);
    for (int64_t i = 0; i < m->inputs; i++, weights += PANEL) {
        prefetch_streams(m, next, i, m->inputs);
        for (int s = 0; s < STREAMS; s++)
            for (int j = 0; j < PANEL_VECTORS; j++) {
                vf w = v_load_half(weights + s * apart + j * VW);
                for (int r = 0; r < rows; r++) sums[s][r][j] = v_fma(v_set(x->x[r * x->stride + i]), w, sums[s][r][j]);
            }
    }
    for (int s = 0; s < STREAMS; s++)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < PANEL_VECTORS; j++) v_store(tiles[s] + r * PANEL + j * VW, sums[s][r][j]);
}

/* A HALF panel as floats, for many rows: widening it again for every tile costs a twelfth of the time. */
INLINE void widen_panel(const Matrix *m, int64_t panel, float *wide) {
    const uint16_t *weights = (const uint16_t *)panel_of(m, panel);
    for (int64_t i = 0; i < m->inputs * PANEL; i += VW) v_store(wide + i, v_load_half(weights + i));
}

/* The same as multiply_half, of a widened panel; asks for the panel `next` meanwhile. */
INLINE void multiply_wide(const Matrix *m, const float *wide, const Operand *x, int64_t first, float *tile, int rows,
                          const char *next) {
    const float *from = x->x + first * x->stride;
    int64_t stride = x->stride;
    vf sums[TILE_ROWS][PANEL_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < PANEL_VECTORS; j++) sums[r][j] = v_set(0.0f);
    for (int64_t i = 0; i < m->inputs; i++, wide += PANEL, next += 2 * PANEL) {
        vf w[PANEL_VECTORS];
        for (int j = 0; j < 2 * PANEL; j += LINE) __builtin_prefetch(next + j, 0, 2);
        for (int j = 0; j < PANEL_VECTORS; j++) w[j] = v_load(wide + j * VW);
        for (int r = 0; r < rows; r++) {
            vf a = v_set(from[r * stride + i]);
            for (int j = 0; j < PANEL_VECTORS; j++) sums[r][j] = v_fma(a, w[j], sums[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < PANEL_VECTORS; j++) v_store(tile + r * PANEL + j * VW, sums[r][j]);
}

/* VW pairs of int8 as int16; sums of VW products of pairs, added. */
INLINE vi load_pairs(const int8_t *p) {
#if defined(ISA_AVX512)
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
#elif defined(ISA_AVX2)
    return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
#else
    vi pairs;
    for (int i = 0; i < VW; i++) pairs[i] = (int32_t)((uint32_t)(uint16_t)p[2 * i] | (uint32_t)(uint16_t)p[2 * i + 1] << 16);
    return pairs;
#endif
}

INLINE vi add_pairs(vi sum, vi a, vi b, int vnni) {
#if defined(ISA_AVX512)
    if (vnni) {
        __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
    return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(ISA_AVX2)
    return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    for (int i = 0; i < VW; i++) sum[i] += (int16_t)a[i] * (int16_t)b[i] + (a[i] >> 16) * (b[i] >> 16);
    return sum;
#endif
}

INLINE vf v_from_int(vi v) { return __builtin_convertvector(v, vf); }

/* The same for INT8; a last odd input has a partner of zero in x and in the weights. */
INLINE void multiply_int8(const Matrix *m, int64_t panel, const Operand *x, int64_t first, float *tile, int rows,
                          const char *next, int vnni) {
    const int8_t *weights = (const int8_t *)panel_of(m, panel);
    const int16_t *from = x->quantised + first * x->stride;
    int64_t stride = x->stride, pairs = pairs_of(m->inputs), groups = groups_of(m->inputs);
    int64_t whole = pairs - AHEAD_BYTES / (2 * PANEL);
    const uint16_t *scales = m->scales + panel * groups * PANEL;
    vf sums[TILE_ROWS][PANEL_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < PANEL_VECTORS; j++) sums[r][j] = v_set(0.0f);
    const char *ahead = whole > 0 ? (const char *)weights + AHEAD_BYTES : next;
    for (int64_t i = 0, end = GROUP_PAIRS; i < pairs; end += GROUP_PAIRS, scales += PANEL) {
        vi exact[TILE_ROWS][PANEL_VECTORS];
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < PANEL_VECTORS; j++) exact[r][j] = v_set_int(0);
        if (end > pairs) end = pairs;
        for (; i < end; i++, weights += 2 * PANEL, ahead += 2 * PANEL) {
            vi w[PANEL_VECTORS];
            if (i == whole) ahead = next;
            for (int j = 0; j < 2 * PANEL; j += LINE) __builtin_prefetch(ahead + j, 0, 3);
            for (int j = 0; j < PANEL_VECTORS; j++) w[j] = load_pairs(weights + 2 * j * VW);
            for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, from + r * stride + 2 * i, 4);
                for (int j = 0; j < PANEL_VECTORS; j++) exact[r][j] = add_pairs(exact[r][j], v_set_int(pair), w[j], vnni);
            }
        }
        for (int j = 0; j < PANEL_VECTORS; j++) {
            vf scale = v_load_half(scales + j * VW);
            for (int r = 0; r < rows; r++) sums[r][j] = v_fma(v_from_int(exact[r][j]), scale, sums[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < PANEL_VECTORS; j++)
            v_store(tile + r * PANEL + j * VW, sums[r][j] * v_set(x->scale[first + r]));
}

/* The same as multiply_int8 for STREAMS panels from `panel` on and the first `rows` rows, which are few. */
INLINE void multiply_int8_streams(const Matrix *m, int64_t panel, const Operand *x, float tiles[STREAMS][TILE_ROWS * PANEL],
                                  int rows, const char *next, int vnni) {
    const int8_t *weights = (const int8_t *)panel_of(m, panel);
    int64_t pairs = pairs_of(m->inputs), groups = groups_of(m->inputs), apart = pairs * 2 * PANEL;
    const uint16_t *scales = m->scales + panel * groups * PANEL;
    vf sums[STREAMS][TILE_ROWS / STREAMS][PANEL_VECTORS];
    for (int s = 0; s < STREAMS; s++)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < PANEL_VECTORS; j++) sums[s][r][j] = v_set(0.0f);
    for (int64_t i = 0, end = GROUP_PAIRS; i < pairs; end += GROUP_PAIRS, scales += PANEL) {
        vi exact[STREAMS][TILE_ROWS / STREAMS][PANEL_VECTORS];
        for (int s = 0; s < STREAMS; s++)
            for (int r = 0; r < rows; r++)
                for (int j = 0; j < PANEL_VECTORS; j++) exact[s][r][j] = v_set_int(0);
        if (end > pairs) end = pairs;
        for (; i < end; i++, weights += 2 * PANEL) {
            prefetch_streams(m, next, i, pairs);
            for (int s = 0; s < STREAMS; s++)
                for (int j = 0; j < PANEL_VECTORS; j++) {
                    vi w = load_pairs(weights + s * apart + 2 * j * VW);
                    for (int r = 0; r < rows; r++) {
                        int32_t pair;
                        memcpy(&pair, x->quantised + r * x->stride + 2 * i, 4);
                        exact[s][r][j] = add_pairs(exact[s][r][j], v_set_int(pair), w, vnni);
                    }
                }
        }
        for (int s = 0; s < STREAMS; s++)
            for (int j = 0; j < PANEL_VECTORS; j++) {
                vf scale = v_load_half(scales + s * groups * PANEL + j * VW);
                for (int r = 0; r < rows; r++) sums[s][r][j] = v_fma(v_from_int(exact[s][r][j]), scale, sums[s][r][j]);
            }
    }
    for (int s = 0; s < STREAMS; s++)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < PANEL_VECTORS; j++)
                v_store(tiles[s] + r * PANEL + j * VW, sums[s][r][j] * v_set(x->scale[r]));
}

/* One row as int16, with the scale that takes its largest element to LARGEST_INT16; up to `padded`, zeros follow.
 * A row with a NaN gets the scale NaN. */
INLINE void quantise_row(const float *x, int64_t inputs, int64_t padded, int16_t *to, float *scale) {
    int64_t whole = inputs - inputs % VW;
    vi top = v_set_int(0);
    int32_t largest = 0;
    for (int64_t i = 0; i < whole; i += VW) {
        vi bits = (vi)v_load(x + i) & v_set_int(0x7fffffff);
        vi larger = bits > top;
        top = (larger & bits) | (~larger & top);
    }
    for (int lane = 0; lane < VW; lane++) largest = top[lane] > largest ? top[lane] : largest;
    for (int64_t i = whole; i < inputs; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float most;
    memcpy(&most, &largest, 4);
    *scale = most / LARGEST_INT16;
    float inverse = most >= 1e-30f && most <= 3e38f ? LARGEST_INT16 / most : 0.0f;
    int64_t i = 0;
#if defined(ISA_AVX512)
    for (; i < whole; i += VW)
        _mm256_storeu_si256((__m256i *)(to + i),
                            _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)(v_load(x + i) * v_set(inverse)))));
#elif defined(ISA_AVX2)
    for (; i < whole; i += VW) {
        __m256i wide = _mm256_cvtps_epi32((__m256)(v_load(x + i) * v_set(inverse)));
        _mm_storeu_si128((__m128i *)(to + i),
                         _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
    }
#endif
    for (; i < inputs; i++) to[i] = (int16_t)lrintf(x[i] * inverse);
    for (; i < padded; i++) to[i] = 0;
}

#endif
