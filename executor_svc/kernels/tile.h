/* Attention of some query rows over one tile of the context, for one KV head.
 *
 * The order of every sum is fixed by the row's own context: a score adds over the head's dimensions from first to
 * last, the output over positions from first to last, the weights lane by lane over the tile. How many rows share a
 * register tile, and whether keys and values are widened on the way or before, changes none of it.
 */
#ifndef JITNEY_TILE_H
#define JITNEY_TILE_H

#include "vec.h"

#define TILE 128       /* positions of a tile: what a partial softmax covers */
#define STRIP 64       /* positions whose widened keys or values are held at once */
#define REGISTER_ROWS 6 /* query rows of a register tile */
#define DIRECT_ROWS 12 /* up to so many rows, half-precision keys and values are widened on the fly */
#define LINE 64        /* bytes of the cache */

typedef struct {
    int64_t rows;      /* query rows, one after another: heads of a group inside queries */
    int64_t group;     /* query heads of a KV head */
    int64_t head_size; /* multiple of 8 */
    int64_t padded;    /* head_size rounded up to whole vectors */
    int64_t stride;    /* elements between the dimensions of a key: tokens of a block */
    const float *q;    /* [rows, head_size], scaled by log2(e) / sqrt(head_size) */
    float *strip;      /* [head_size, STRIP] widened keys */
    float *scores;     /* [rows, TILE] */
    float *wide;       /* [STRIP, padded] widened values */
} Rows;

/* Positions of the context: where the first element of their keys and values is, of the pool's first head. A key's next
 * element is `stride` further on, a value's beside it. */
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

/* Asks for positions from..to-1, so that they are in the second-level cache when their turn comes: blocks lie
 * scattered, and the processor's own prefetching stops at each block's end. */
INLINE void prefetch_values(const Rows *w, const Tile *tile, int64_t offset, int64_t from, int64_t to, int half) {
    int64_t bytes = w->head_size * (half ? 2 : 4);
    for (int64_t t = from; t < to; t++)
        for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(tile->values[t] + offset + i, 0, 2);
}

/* Whether VW positions of a tile from a multiple of VW on are neighbours in one block. */
INLINE int are_vectors(const Rows *w) { return w->stride % VW == 0; }

INLINE void prefetch_keys(const Rows *w, const Tile *tile, int64_t offset, int64_t from, int64_t to, int half) {
    int64_t apart = w->stride * (half ? 2 : 4), bytes = w->head_size * apart;
    if (!are_vectors(w)) return;
    for (int64_t t = from; t < to; t += VW)
        for (int64_t i = 0; i < bytes; i += apart < LINE ? LINE : apart)
            __builtin_prefetch(tile->keys[t] + offset + i, 0, 2);
}

/* Keys of VW positions, of which the first `count` are the context's, to strip[dimension]: in pieces or one by one. */
INLINE void collect_keys(const Rows *w, const char *const *keys, int64_t offset, int64_t count, float *strip,
                         int half) {
#if defined(ISA_AVX512)
    if (half && w->stride % 8 == 0) {
        const uint16_t *a = (const uint16_t *)(keys[0] + offset);
        const uint16_t *b = count > 8 ? (const uint16_t *)(keys[8] + offset) : a;
        for (int64_t d = 0; d < w->head_size; d++, a += w->stride, b += w->stride)
            v_store(strip + d * STRIP, v_load_half_pair(a, b));
        return;
    }
#endif
    for (int64_t i = 0; i < VW; i++)
        for (int64_t d = 0; d < w->head_size; d++)
            strip[d * STRIP + i] = i < count ? get_as_float(keys[i] + offset, d * w->stride, half) : 0.0f;
}

/* Keys of positions from..to-1 (at most STRIP) to strip[dimension][position], in whole vectors. */
INLINE void widen_keys(const Rows *w, const char *const *keys, int64_t offset, int64_t from, int64_t to, int half) {
    for (int64_t t = from; t < to; t += VW) {
        float *strip = w->strip + t - from;
        if (!are_vectors(w)) {
            collect_keys(w, keys + t, offset, to - t, strip, half);
            continue;
        }
        const char *key = keys[t] + offset;
        for (int64_t d = 0; d < w->head_size; d++) v_store(strip + d * STRIP, load_as_float(key, d * w->stride, half));
    }
}

/* Scores of `rows` query rows at `vectors` * VW positions; keys[j * VW] is where vector j is, its next dimension is
 * `stride` elements further on. Asks meanwhile for as many half-precision values, if given: values[j * VW] is where
 * those of vector j begin. A burst of requests would make the loads behind it wait. */
INLINE void score_block(const float *q, int64_t head_size, const char *const *keys, const char *const *values,
                        int64_t offset, int64_t stride, float *scores, int half, int rows, int vectors) {
    vf acc[REGISTER_ROWS][VN];
    const char *from[VN], *ahead[VN];
    for (int j = 0; j < vectors && values; j++) ahead[j] = values[j * VW] + offset;
    for (int j = 0; j < vectors; j++) from[j] = keys[j * VW] + offset;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) acc[r][j] = v_set(0.0f);
    for (int64_t d = 0; d < head_size; d++) {
        vf k[VN];
        for (int j = 0; j < vectors && values; j++) __builtin_prefetch(ahead[j] + d * 2 * VW, 0, 2);
        for (int j = 0; j < vectors; j++) k[j] = load_as_float(from[j], d * stride, half);
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

#define FOR_VECTORS(rows, count, CALL)  \
    switch (count) {                    \
        case 1: CALL(rows, 1); break;   \
        case 2: CALL(rows, 2); break;   \
        case 3: CALL(rows, 3 < VN ? 3 : VN); break; \
        default: CALL(rows, VN); break; \
    }

/* Scores of `rows` rows from `row` on at positions from..to-1 of the tile, where `keys` and `values` begin. */
INLINE void score_any(const Rows *w, int64_t row, int64_t rows, int64_t from, int64_t to, const char *const *keys,
                      const char *const *values, int64_t offset, int64_t stride, int half) {
    const float *q = w->q + row * w->head_size;
    for (int64_t t = from; t < to; t += VN * VW, keys += VN * VW) {
        const char *const *ahead = half ? values + (t - from) : NULL;
        float *scores = w->scores + row * TILE + t;
        int64_t vectors = least(VN, (to - t + VW - 1) / VW);
#define ONE(n, m) score_block(q, w->head_size, keys, ahead, offset, stride, scores, half, n, m)
#define CALL(n) FOR_VECTORS(n, vectors, ONE)
        FOR_ROWS(rows, CALL)
#undef CALL
#undef ONE
    }
}

ONCE void score_halves(const Rows *w, int64_t row, int64_t rows, int64_t from, int64_t to, const char *const *keys,
                       const char *const *values, int64_t offset) {
    score_any(w, row, rows, from, to, keys, values, offset, w->stride, 1);
}

ONCE void score_floats(const Rows *w, int64_t row, int64_t rows, int64_t from, int64_t to, const char *const *keys,
                       int64_t offset, int64_t stride) {
    score_any(w, row, rows, from, to, keys, NULL, offset, stride, 0);
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

/* Positions of a tile that a row attends to, if its first query comes `before` positions behind the tile's start. */
INLINE int64_t seen(const Rows *w, int64_t before, int64_t row, int64_t count) {
    int64_t bound = before + row / w->group + 1;
    return bound < 0 ? 0 : least(bound, count);
}

/* Scores of all rows at the tile's positions. Asks for the tile's values. */
INLINE void score_tile(const Rows *w, const Tile *tile, int64_t offset, int64_t before, int half) {
    const char *widened[STRIP];
    int direct = half && w->rows <= DIRECT_ROWS && are_vectors(w);
    for (int64_t t = 0; t < STRIP; t++) widened[t] = (const char *)(w->strip + t);
    for (int64_t strip = 0; strip < tile->count; strip += STRIP) {
        int64_t to = least(strip + STRIP, tile->count);
        if (!direct) {
            prefetch_values(w, tile, offset, strip, to, half);
            widen_keys(w, tile->keys, offset, strip, to, half);
        }
        for (int64_t r = 0; r < w->rows; r += REGISTER_ROWS) {
            int64_t rows = least(REGISTER_ROWS, w->rows - r);
            int64_t end = least(seen(w, before, r + rows - 1, tile->count), to);
            if (direct)
                score_halves(w, r, rows, strip, end, tile->keys + strip, tile->values + strip, offset);
            else
                score_floats(w, r, rows, strip, end, widened, 0, STRIP);
        }
    }
}

/* Values of positions from..to-1 as floats in whole vectors; to[position] points to each. */
INLINE void widen_values(const Rows *w, const Tile *tile, int64_t offset, int64_t from, int64_t end, const char **to,
                         int half) {
    for (int64_t t = from; t < end; t++) {
        float *row = w->wide + (t - from) * w->padded;
        const char *value = tile->values[t] + offset;
        int64_t d = 0;
        for (; d + VW <= w->head_size; d += VW) v_store(row + d, load_as_float(value, d, half));
        for (; d < w->padded; d++) row[d] = d < w->head_size ? get_as_float(value, d, half) : 0.0f;
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

/* Weighted values of all rows. Asks for the keys of `next`. */
INLINE void weigh_tile(const Rows *w, const Tile *tile, int64_t offset, int64_t before, float *accs, const Tile *next,
                       int64_t next_offset, int half) {
    const char *widened[TILE];
    int direct = w->rows <= DIRECT_ROWS && w->head_size == w->padded;
    for (int64_t t = 0; t < tile->count; t += STRIP) {
        int64_t to = least(t + STRIP, tile->count);
        prefetch_keys(w, next, next_offset, t, least(to, next->count), half);
        if (!direct) widen_values(w, tile, offset, t, to, widened, half);
        for (int64_t r = 0; r < w->rows; r += REGISTER_ROWS)
            weigh_register_tile(w, r, least(REGISTER_ROWS, w->rows - r), direct ? tile->values : widened,
                                direct ? offset : 0, t, to, before, accs, direct && half);
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
    weigh_tile(w, tile, offset, before, state.acc, next, next_offset, half);
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
