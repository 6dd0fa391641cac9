/* Register tiles of a product: some rows of x times one panel of packed weights.
 *
 * Weights lie in panels of PANEL outputs, the last one filled up with zeros.
 *   HALF: half precision, packed[panel][input][PANEL]. An output is one chain of fused products over the inputs, from
 *         first to last.
 *   INT8, INT16: whole numbers of that many bits, packed[panel][group][GROUP / 2][PANEL][2], each GROUP of inputs, the
 *         last one filled up, with a scale for each output after it, [PANEL], in half precision and in units of `unit`:
 *         memory is read in one go. Rows of x are int16, with a scale for each GROUP too. Products of a group are summed exactly, as int32: their sum stays below
 *         2^31 because INT8 is at most 64 * 127 * 32,767, and INT16 is packed so that the magnitudes of a group add up to
 *         no more than 2^31 / 16,383. An output is one chain of fused products of sums and scales.
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
#define SCALES (2 * PANEL) /* bytes of a group's scales */
#define AHEAD_BYTES 4096  /* of a panel that are asked for before they are needed */
#define STREAM_AHEAD_BYTES 1024 /* of each of the next panels, where several are read */
#define STREAM_LEAD_BYTES 2048  /* of each panel that is read, for INT16: 2 to 5 % at one row; INT8 loses as much */
#define LINE 64           /* bytes of the cache */
#define FEW_ROWS 4        /* up to so many rows, each thread makes whole numbers of all of them for itself, */
#define OWN_NUMBERS 8192  /* if they are no more than that */

enum { HALF, INT8, INT16 };

/* One layer. `bias` may be null; `unit` is for whole numbers. */
typedef struct {
    const void *packed;
    const float *bias;
    int64_t inputs, outputs, kind;
    float unit;
} Matrix;

/* Rows that are multiplied: `x` for HALF; else `quantised`, and scales [row][group]. Strides are elements. */
typedef struct {
    const float *x;
    const int16_t *quantised;
    const float *scale;
    int64_t stride;
} Operand;

/* A thread's own whole numbers of few rows. */
typedef struct {
    int16_t quantised[OWN_NUMBERS];
    float scale[OWN_NUMBERS / GROUP + FEW_ROWS];
} Own;

INLINE int64_t pairs_of(int64_t inputs) { return (inputs + 1) / 2; }
INLINE int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }
INLINE int64_t pair_bytes(int64_t kind) { return (kind == INT16 ? 4 : 2) * PANEL; }
INLINE int64_t panel_bytes(const Matrix *m) {
    if (m->kind == HALF) return m->inputs * 2 * PANEL;
    return groups_of(m->inputs) * (GROUP_PAIRS * pair_bytes(m->kind) + SCALES);
}
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

/* After `done` bytes of a panel: asks for the beginning of the panels that come next, side by side from `next` on. */
INLINE void prefetch_streams(const Matrix *m, const char *next, int64_t done, int64_t bytes) {
    int64_t panel = panel_bytes(m), at = done - (panel - STREAM_AHEAD_BYTES);
    if (at < 0) return;
    for (int s = 0; s < STREAMS; s++)
        for (int j = 0; j < bytes; j += LINE) __builtin_prefetch(next + s * panel + at + j, 0, 3);
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
        prefetch_streams(m, next, i * 2 * PANEL, 2 * PANEL);
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

/* VW pairs of whole numbers as int16; sums of VW products of pairs, added. */
INLINE vi load_pairs(const char *p, int kind) {
    vi pairs;
    if (kind == INT16) {
        memcpy(&pairs, p, sizeof pairs);
        return pairs;
    }
#if defined(ISA_AVX512)
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
#elif defined(ISA_AVX2)
    return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
#else
    const int8_t *from = (const int8_t *)p;
    for (int i = 0; i < VW; i++)
        pairs[i] = (int32_t)((uint32_t)(uint16_t)from[2 * i] | (uint32_t)(uint16_t)from[2 * i + 1] << 16);
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

/* sums += exact sums of a group, times both scales. */
INLINE void scale_group(vf *sums, const vi *exact, const char *scales, const float *steps, int64_t groups, int rows) {
    vf scale[PANEL_VECTORS];
    for (int j = 0; j < PANEL_VECTORS; j++) scale[j] = v_load_half((const uint16_t *)scales + j * VW);
    for (int r = 0; r < rows; r++) {
        vf step = v_set(steps[r * groups]);
        for (int j = 0; j < PANEL_VECTORS; j++) {
            int i = r * PANEL_VECTORS + j;
            sums[i] = v_fma(v_from_int(exact[i]), scale[j] * step, sums[i]);
        }
    }
}

/* exact += products of one pair of inputs of some rows with a panel's. */
INLINE void multiply_pair(vi *exact, const char *weights, const int16_t *x, int64_t stride, int rows, int kind, int vnni) {
    vi w[PANEL_VECTORS];
    for (int j = 0; j < PANEL_VECTORS; j++) w[j] = load_pairs(weights + j * pair_bytes(kind) / PANEL_VECTORS, kind);
    for (int r = 0; r < rows; r++) {
        int32_t pair;
        memcpy(&pair, x + r * stride, 4);
        vi both = v_set_int(pair);
        for (int j = 0; j < PANEL_VECTORS; j++)
            exact[r * PANEL_VECTORS + j] = add_pairs(exact[r * PANEL_VECTORS + j], both, w[j], vnni);
    }
}

INLINE void store_sums(const Matrix *m, const vf *sums, float *tile, int rows) {
    for (int i = 0; i < rows * PANEL_VECTORS; i++) v_store(tile + i * VW, sums[i] * v_set(m->unit));
}

/* The same for whole numbers; a last odd input has a partner of zero in x and in the weights. */
INLINE void multiply_whole(const Matrix *m, int64_t panel, const Operand *x, int64_t first, float *tile, int rows,
                           const char *next, int kind, int vnni) {
    const char *weights = panel_of(m, panel);
    const int16_t *from = x->quantised + first * x->stride;
    int64_t pairs = pairs_of(m->inputs), groups = groups_of(m->inputs), bytes = pair_bytes(kind);
    int64_t group = GROUP_PAIRS * bytes + SCALES, lead = kind == INT16 ? 1 : 2;
    const float *steps = x->scale + first * groups;
    vf sums[TILE_ROWS * PANEL_VECTORS];
    for (int i = 0; i < rows * PANEL_VECTORS; i++) sums[i] = v_set(0.0f);
    for (int64_t g = 0, i = 0; g < groups; g++) {
        int64_t to = (g + 1) * GROUP_PAIRS < pairs ? (g + 1) * GROUP_PAIRS : pairs;
        const char *scales = weights + GROUP_PAIRS * bytes;
        vi exact[TILE_ROWS * PANEL_VECTORS];
        for (int e = 0; e < rows * PANEL_VECTORS; e++) exact[e] = v_set_int(0);
        const char *ahead = g + lead < groups ? weights + lead * group : next + (g + lead - groups) * group;
        for (; i < to; i++, weights += bytes, ahead += bytes) {
            for (int j = 0; j < bytes; j += LINE) __builtin_prefetch(ahead + j, 0, 3);
            multiply_pair(exact, weights, from + 2 * i, x->stride, rows, kind, vnni);
        }
        __builtin_prefetch(ahead, 0, 3);
        scale_group(sums, exact, scales, steps + g, groups, rows);
        weights = scales + SCALES;
    }
    store_sums(m, sums, tile, rows);
}

/* The same as multiply_whole for STREAMS panels from `panel` on and the first `rows` rows, which are few. */
INLINE void multiply_whole_streams(const Matrix *m, int64_t panel, const Operand *x, float tiles[STREAMS][TILE_ROWS * PANEL],
                                   int rows, const char *next, int kind, int vnni) {
    const char *start = panel_of(m, panel), *weights = start;
    int64_t pairs = pairs_of(m->inputs), groups = groups_of(m->inputs), bytes = pair_bytes(kind), apart = panel_bytes(m);
    vf sums[STREAMS][TILE_ROWS / STREAMS * PANEL_VECTORS];
    for (int s = 0; s < STREAMS; s++)
        for (int i = 0; i < rows * PANEL_VECTORS; i++) sums[s][i] = v_set(0.0f);
    for (int64_t g = 0, i = 0; g < groups; g++) {
        int64_t to = (g + 1) * GROUP_PAIRS < pairs ? (g + 1) * GROUP_PAIRS : pairs;
        const char *scales = weights + GROUP_PAIRS * bytes;
        vi exact[STREAMS][TILE_ROWS / STREAMS * PANEL_VECTORS];
        for (int s = 0; s < STREAMS; s++)
            for (int e = 0; e < rows * PANEL_VECTORS; e++) exact[s][e] = v_set_int(0);
        for (; i < to; i++, weights += bytes) {
            prefetch_streams(m, next, weights - start, bytes);
            for (int s = 0; kind == INT16 && s < STREAMS; s++)
                for (int j = 0; j < bytes; j += LINE)
                    __builtin_prefetch(weights + s * apart + STREAM_LEAD_BYTES + j, 0, 2);
            for (int s = 0; s < STREAMS; s++)
                multiply_pair(exact[s], weights + s * apart, x->quantised + 2 * i, x->stride, rows, kind, vnni);
        }
        prefetch_streams(m, next, scales - start, SCALES);
        for (int s = 0; s < STREAMS; s++) scale_group(sums[s], exact[s], scales + s * apart, x->scale + g, groups, rows);
        weights = scales + SCALES;
    }
    for (int s = 0; s < STREAMS; s++) store_sums(m, sums[s], tiles[s], rows);
}

/* The largest magnitude of a row, as the bits of a float; those of a NaN if there is one. */
INLINE int32_t largest_bits(const float *x, int64_t count) {
    int64_t whole = count - count % VW;
    vi top = v_set_int(0);
    int32_t largest = 0;
    for (int64_t i = 0; i < whole; i += VW) {
        vi bits = (vi)v_load(x + i) & v_set_int(0x7fffffff);
        vi larger = bits > top;
        top = (larger & bits) | (~larger & top);
    }
#if defined(ISA_AVX512)
    largest = _mm512_reduce_max_epi32((__m512i)top);
#else
    for (int lane = 0; lane < VW; lane++) largest = top[lane] > largest ? top[lane] : largest;
#endif
    for (int64_t i = whole; i < count; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Numbers of a group as int16, and the scale that takes the largest of them to `limit`. One with a NaN gets the scale
 * NaN. */
INLINE void quantise_group(const float *x, int64_t count, float limit, int16_t *to, float *scale) {
    int32_t largest = largest_bits(x, count);
    float most;
    memcpy(&most, &largest, 4);
    *scale = most / limit;
    float inverse = most >= 1e-30f && most <= 3e38f ? limit / most : 0.0f;
    int64_t i = 0;
#if defined(ISA_AVX512)
    for (; i + VW <= count; i += VW)
        _mm256_storeu_si256((__m256i *)(to + i),
                            _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)(v_load(x + i) * v_set(inverse)))));
#elif defined(ISA_AVX2)
    for (; i + VW <= count; i += VW) {
        __m256i wide = _mm256_cvtps_epi32((__m256)(v_load(x + i) * v_set(inverse)));
        _mm_storeu_si128((__m128i *)(to + i),
                         _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
    }
#endif
    for (; i < count; i++) to[i] = (int16_t)lrintf(x[i] * inverse);
}

/* One row for weights of that kind; a last odd input gets a partner of zero. */
INLINE void quantise_row(const float *x, int64_t inputs, int64_t kind, int16_t *to, float *scales) {
    float limit = kind == INT16 ? 16383.0f : 32767.0f;
    for (int64_t from = 0; from < inputs; from += GROUP)
        quantise_group(x + from, inputs - from < GROUP ? inputs - from : GROUP, limit, to + from, scales + from / GROUP);
    if (inputs % 2) to[inputs] = 0;
}

#endif
