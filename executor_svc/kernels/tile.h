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
#define AHEAD 16       /* positions weighed between two requests for the keys that come next */

typedef struct {
    int64_t rows;      /* query rows, one after another: heads of a group inside queries */
    int64_t group;     /* query heads of a KV head */
    int64_t head_size; /* multiple of 8 */
    int64_t padded;    /* head_size rounded up to whole vectors */
    const float *q;    /* [rows, head_size], scaled by log2(e) / sqrt(head_size) */
    float *strip;      /* [head_size, STRIP] transposed keys */
    float *scores;     /* [rows, TILE] */
    float *wide;       /* [TILE, padded] widened values */
} Rows;

/* Positions of the context: where their keys and values are, all heads. */
typedef struct {
    const char *keys[TILE];
    const char *values[TILE];
    int64_t count;
} Tile;

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

/* Asks for rows from..to-1, so that they are in the second-level cache when their turn comes: blocks lie scattered,
 * and the processor's own prefetching stops at every row of another head. */
INLINE void prefetch_rows(const char *const *rows, int64_t offset, int64_t from, int64_t to, int64_t bytes) {
    for (int64_t t = from; t < to; t++)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(rows[t] + offset + i, 0, 2);
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

/* Keys of positions from..to-1 (at most STRIP) into strip[dimension][position]; the rest of the last vector is zero.
 * Asks for their values, if `values` is given. */
INLINE void pack_keys(const Rows *w, const char *const *keys, const char *const *values, int64_t offset, int64_t from,
                      int64_t to, int half) {
    static const float zeros[MAX_HEAD] __attribute__((aligned(64)));
    int64_t whole = w->head_size - w->head_size % VW, bytes = w->head_size * (half ? 2 : 4);
    for (int64_t t = 0; t < to - from; t += VW) {
        const char *row[VW];
        for (int i = 0; i < VW; i++) row[i] = from + t + i < to ? keys[from + t + i] + offset : (const char *)zeros;
        if (values) prefetch_rows(values, offset, from + t, from + t + VW < to ? from + t + VW : to, bytes);
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

ONCE void score_rows(const Rows *w, int64_t row, int64_t strip, int64_t rows, int64_t positions) {
    const float *q = w->q + row * w->head_size;
    float *scores = w->scores + row * TILE + strip;
    for (int64_t t = 0; t < positions; t += VN * VW) {
#define CALL(n) score_block(q, w->head_size, w->strip + t, scores + t, n, VN)
        FOR_ROWS(rows, CALL)
#undef CALL
    }
}

INLINE void weigh_any(const Rows *w, int64_t row, const char *const *values, int64_t offset, int64_t from, int64_t to,
                      float *accs, int64_t rows, int half) {
    const float *weights = w->scores + row * TILE;
    float *acc = accs + row * w->padded;
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

ONCE void weigh_halves(const Rows *w, int64_t row, const char *const *values, int64_t offset, int64_t from, int64_t to,
                       float *accs, int64_t rows) {
    weigh_any(w, row, values, offset, from, to, accs, rows, 1);
}

ONCE void weigh_floats(const Rows *w, int64_t row, const char *const *values, int64_t offset, int64_t from, int64_t to,
                       float *accs, int64_t rows) {
    weigh_any(w, row, values, offset, from, to, accs, rows, 0);
}

INLINE void weigh_rows(const Rows *w, int64_t row, const char *const *values, int64_t offset, int64_t from, int64_t to,
                       float *accs, int64_t rows, int half) {
    (half ? weigh_halves : weigh_floats)(w, row, values, offset, from, to, accs, rows);
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Positions of a tile that a row attends to, if its first query comes `before` positions behind the tile's start. */
INLINE int64_t seen(const Rows *w, int64_t before, int64_t row, int64_t count) {
    int64_t bound = before + row / w->group + 1;
    return bound < 0 ? 0 : least(bound, count);
}

/* Few rows share a tile: their values are read as they lie, and what comes next is asked for meanwhile. */
INLINE int is_narrow(const Rows *w) { return w->rows <= DIRECT_ROWS && w->head_size == w->padded; }

/* Scores of all rows at the tile's positions. */
INLINE void score_tile(const Rows *w, const Tile *tile, int64_t offset, int64_t before, int half) {
    for (int64_t strip = 0; strip < tile->count; strip += STRIP) {
        int64_t to = least(strip + STRIP, tile->count);
        pack_keys(w, tile->keys, is_narrow(w) ? tile->values : NULL, offset, strip, to, half);
        for (int64_t r = 0; r < w->rows; r += REGISTER_ROWS) {
            int64_t rows = least(REGISTER_ROWS, w->rows - r);
            score_rows(w, r, strip, rows, least(seen(w, before, r + rows - 1, tile->count), to) - strip);
        }
    }
}

/* The tile's values as floats in whole vectors; rows of them are pointed to by `to`. */
INLINE void widen_values(const Rows *w, const Tile *tile, int64_t offset, const char **to, int half) {
    for (int64_t t = 0; t < tile->count; t++) {
        float *row = w->wide + t * w->padded;
        const char *from = tile->values[t] + offset;
        int64_t d = 0;
        for (; d + VW <= w->head_size; d += VW) v_store(row + d, load_as_float(from, d, half));
        for (; d < w->padded; d++) row[d] = d < w->head_size ? get_as_float(from, d, half) : 0.0f;
        to[t] = (const char *)row;
    }
}

/* Weighted values of a register tile of rows: first what all of them see, then what only the later ones do. */
INLINE void weigh_register_tile(const Rows *w, int64_t row, int64_t rows, const char *const *values, int64_t offset,
                                int64_t from, int64_t count, int64_t before, float *accs, int half) {
    int64_t shared = seen(w, before, row, count);
    if (shared < from) shared = from;
    weigh_rows(w, row, values, offset, from, shared, accs, rows, half);
    for (int64_t r = row; r < row + rows; r++) {
        int64_t mine = seen(w, before, r, count);
        if (mine > shared) weigh_rows(w, r, values, offset, shared, mine, accs, 1, half);
    }
}

/* One KV head over one tile. `next` is the tile that this head or the next one reads after it, at next_offset. */
INLINE void attend_tile(const Rows *w, const Tile *tile, int64_t offset, int64_t before, State state, const Tile *next,
                        int64_t next_offset, int half) {
    memset(state.acc, 0, w->rows * w->padded * sizeof(float));
    score_tile(w, tile, offset, before, half);
    for (int64_t r = 0; r < w->rows; r++) {
        int64_t count = seen(w, before, r, tile->count);
        if (count) soften(w->scores + r * TILE, count, state.top + r, state.sum + r);
    }
    if (!is_narrow(w)) {
        const char *wide[TILE];
        widen_values(w, tile, offset, wide, half);
        for (int64_t r = 0; r < w->rows; r += REGISTER_ROWS)
            weigh_register_tile(w, r, least(REGISTER_ROWS, w->rows - r), wide, 0, 0, tile->count, before, state.acc, 0);
        return;
    }
    for (int64_t t = 0; t < tile->count; t += AHEAD) {
        int64_t to = least(t + AHEAD, tile->count);
        prefetch_rows(next->keys, next_offset, t, least(to, next->count), w->head_size * (half ? 2 : 4));
        for (int64_t r = 0; r < w->rows; r += REGISTER_ROWS)
            weigh_register_tile(w, r, least(REGISTER_ROWS, w->rows - r), tile->values, offset, t, to, before, state.acc,
                                half);
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
