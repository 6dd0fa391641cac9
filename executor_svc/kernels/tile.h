/* Attention of some query rows over one tile of the context, for one KV head.
 *
 * The order of every sum is fixed by the row's own context: a score adds over the head's dimensions from first to
 * last, the output over positions from first to last, the weights lane by lane over the tile. How many rows share a
 * register tile changes none of it.
 */
#ifndef JITNEY_TILE_H
#define JITNEY_TILE_H

#include "vec.h"

#define TILE 256       /* positions of a tile: what a partial softmax covers */
#define STRIP 64       /* positions of transposed keys held at once */
#define REGISTER_ROWS 6 /* query rows of a register tile */
#define DIRECT_ROWS 12 /* up to so many rows, half-precision values are widened on the fly */
#define MAX_HEAD 256

typedef struct {
    int64_t rows;      /* query rows, one after another: heads of a group inside queries */
    int64_t group;     /* query heads of a KV head */
    int64_t head_size; /* multiple of 8 */
    int64_t padded;    /* head_size rounded up to whole vectors */
    int half;          /* element type of keys and values */
    const float *q;    /* [rows, head_size], scaled by log2(e) / sqrt(head_size) */
    float *strip;      /* [head_size, STRIP] transposed keys */
    float *scores;     /* [rows, TILE] */
    float *wide;       /* [TILE, padded] widened values */
} Rows;

typedef struct {
    float *top;  /* [rows] largest score, in powers of two */
    float *sum;  /* [rows] sum of weights */
    float *acc;  /* [rows, padded] weighted values */
} State;

INLINE vf load_as_float(const char *p, int64_t index, int half) {
    return half ? v_load_half((const uint16_t *)p + index) : v_load((const float *)p + index);
}

INLINE float get_as_float(const char *p, int64_t index, int half) {
    return half ? half_to_float(((const uint16_t *)p)[index]) : ((const float *)p)[index];
}

/* VW rows of VW elements to VW columns, `stride` apart. */
INLINE void store_transposed(vf *r, float *to, int64_t stride) {
#if defined(ISA_AVX512)
    __m512 t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps((__m512)r[i], (__m512)r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps((__m512)r[i], (__m512)r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d low = (__m512d)t[i + j], high = (__m512d)t[i + j + 2];
            u[i + 2 * j] = (__m512)_mm512_unpacklo_pd(low, high);
            u[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(low, high);
        }
    for (int c = 0; c < 4; c++) {
        __m512 a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88), b = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd);
        __m512 e = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88), f = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
        v_store(to + c * stride, (vf)_mm512_shuffle_f32x4(a, e, 0x88));
        v_store(to + (4 + c) * stride, (vf)_mm512_shuffle_f32x4(b, f, 0x88));
        v_store(to + (8 + c) * stride, (vf)_mm512_shuffle_f32x4(a, e, 0xdd));
        v_store(to + (12 + c) * stride, (vf)_mm512_shuffle_f32x4(b, f, 0xdd));
    }
#elif defined(ISA_AVX2)
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps((__m256)r[i], (__m256)r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps((__m256)r[i], (__m256)r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            __m256d low = (__m256d)t[i + j], high = (__m256d)t[i + j + 2];
            u[i + 2 * j] = (__m256)_mm256_unpacklo_pd(low, high);
            u[i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd(low, high);
        }
    for (int c = 0; c < 4; c++) {
        v_store(to + c * stride, (vf)_mm256_permute2f128_ps(u[c], u[4 + c], 0x20));
        v_store(to + (4 + c) * stride, (vf)_mm256_permute2f128_ps(u[c], u[4 + c], 0x31));
    }
#else
    for (int c = 0; c < VW; c++)
        for (int i = 0; i < VW; i++) to[c * stride + i] = r[i][c];
#endif
}

/* Keys of `count` positions (at most STRIP) into strip[dimension][position]; the rest of the last vector is zero. */
INLINE void pack_keys(const Rows *w, const char *const *keys, int64_t offset, int64_t count, int half) {
    static const float zeros[MAX_HEAD] __attribute__((aligned(64)));
    int64_t whole = w->head_size - w->head_size % VW;
    for (int64_t t = 0; t < count; t += VW) {
        const char *row[VW];
        for (int i = 0; i < VW; i++) row[i] = t + i < count ? keys[t + i] + offset : (const char *)zeros;
        for (int64_t d = 0; d < whole; d += VW) {
            vf r[VW];
            for (int i = 0; i < VW; i++) r[i] = load_as_float(row[i], d, half);
            store_transposed(r, w->strip + d * STRIP + t, STRIP);
        }
        for (int64_t d = whole; d < w->head_size; d++)
            for (int i = 0; i < VW; i++) w->strip[d * STRIP + t + i] = get_as_float(row[i], d, half);
    }
}

/* Scores of `rows` query rows at `vectors` * VW positions. */
INLINE void score_block(const float *q, int64_t head_size, const float *strip, float *scores, int rows, int vectors) {
    vf acc[REGISTER_ROWS][VN];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) acc[r][j] = v_set(0.0f);
    for (int64_t d = 0; d < head_size; d++) {
        vf k[VN];
        for (int j = 0; j < vectors; j++) k[j] = v_load(strip + d * STRIP + j * VW);
        for (int r = 0; r < rows; r++) {
            vf x = v_set(q[r * head_size + d]);
            for (int j = 0; j < vectors; j++) acc[r][j] = v_fma(x, k[j], acc[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) v_store(scores + r * TILE + j * VW, acc[r][j]);
}

/* Weights of one row in place of its `count` scores; their sum and the largest score. */
INLINE void soften(float *scores, int64_t count, float *top, float *sum) {
    int64_t whole = count - count % VW;
    vi valid = v_lanes() < v_set_int((int32_t)(count % VW));
    vf highest = v_set(-INFINITY), total = v_set(0.0f);
    for (int64_t i = 0; i < whole; i += VW) highest = v_max(v_load(scores + i), highest);
    if (whole < count) highest = v_max(v_pick(valid, v_load(scores + whole), highest), highest);
    float peak = v_top(highest);
    for (int64_t i = 0; i < whole; i += VW) {
        vf p = v_exp2(v_load(scores + i) - v_set(peak));
        v_store(scores + i, p);
        total += p;
    }
    if (whole < count) {
        vf p = v_pick(valid, v_exp2(v_load(scores + whole) - v_set(peak)), v_set(0.0f));
        v_store(scores + whole, p);
        total += p;
    }
    *top = peak;
    *sum = v_sum(total);
}

/* acc += weights * values over positions from..to-1, for `rows` rows and `vectors` vectors of the head. */
INLINE void weigh_block(const float *weights, const char *const *values, int64_t offset, int64_t column, int64_t from,
                        int64_t to, float *acc, int64_t padded, int half, int rows, int vectors) {
    vf sums[REGISTER_ROWS][VN];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) sums[r][j] = v_load(acc + r * padded + column + j * VW);
    for (int64_t t = from; t < to; t++) {
        vf v[VN];
        for (int j = 0; j < vectors; j++) v[j] = load_as_float(values[t] + offset, column + j * VW, half);
        for (int r = 0; r < rows; r++) {
            vf p = v_set(weights[r * TILE + t]);
            for (int j = 0; j < vectors; j++) sums[r][j] = v_fma(p, v[j], sums[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) v_store(acc + r * padded + column + j * VW, sums[r][j]);
}

#define FOR_ROWS(count, CALL)     \
    switch (count) {              \
        case 1: CALL(1); break;   \
        case 2: CALL(2); break;   \
        case 3: CALL(3); break;   \
        case 4: CALL(4); break;   \
        case 5: CALL(5); break;   \
        default: CALL(6); break;  \
    }

INLINE void score_rows(const float *q, int64_t head_size, const float *strip, float *scores, int64_t rows,
                       int64_t positions) {
    for (int64_t t = 0; t < positions; t += VN * VW) {
#define CALL(n) score_block(q, head_size, strip + t, scores + t, n, VN)
        FOR_ROWS(rows, CALL)
#undef CALL
    }
}

INLINE void weigh_rows(const Rows *w, const float *weights, const char *const *values, int64_t offset, int64_t from,
                       int64_t to, float *acc, int64_t rows, int half) {
    int64_t column = 0;
    for (; column + VN * VW <= w->padded; column += VN * VW) {
#define CALL(n) weigh_block(weights, values, offset, column, from, to, acc, w->padded, half, n, VN)
        FOR_ROWS(rows, CALL)
#undef CALL
    }
    for (; column < w->padded; column += VW) {
#define CALL(n) weigh_block(weights, values, offset, column, from, to, acc, w->padded, half, n, 1)
        FOR_ROWS(rows, CALL)
#undef CALL
    }
}

/* Adds a later tile's sums of one row to what the tiles before it gave. */
INLINE void fold(float *top, float *sum, float *acc, float tile_top, float tile_sum, const float *tile_acc,
                 int64_t padded) {
    float peak = *top > tile_top ? *top : tile_top;
    vf before = v_exp2(v_set(*top - peak)), now = v_exp2(v_set(tile_top - peak));
    *sum = v_fma(v_set(tile_sum), now, v_set(*sum) * before)[0];
    for (int64_t i = 0; i < padded; i += VW)
        v_store(acc + i, v_fma(v_load(tile_acc + i), now, v_load(acc + i) * before));
    *top = peak;
}

#endif
