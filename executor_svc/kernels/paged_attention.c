/* Causal attention of a step's query rows over a paged, block-major pool of keys and values.
 *
 * pool: [blocks, layers, 2, block_tokens, kv_heads, head_size]. Work comes as items: some queries of one plan row, for
 * some KV heads. A long context of a single query may be split into one item a tile ("part"), whose sums are folded
 * afterwards in the order of the context, as an unsplit item folds them.
 */
#include <stdint.h>

#include "parallel.h"
#include "tile.h"

typedef struct {
    int32_t row;     /* of the plan */
    int32_t first;   /* first query of the row */
    int32_t queries;
    int32_t head;    /* first KV head */
    int32_t heads;
    int32_t tile;    /* the only tile to do, or -1: all */
    int32_t slot;    /* where a part's sums go */
} Item;

typedef struct {
    int32_t row;
    int32_t slot;  /* of its first part */
    int32_t parts; /* in neighbouring slots */
} Merge;

typedef struct {
    const char *pool; /* at the layer's keys of block 0 */
    const float *q;   /* [tokens, heads, head_size] */
    float *out;
    int64_t q_stride, out_stride; /* floats between tokens */
    int64_t block_stride;         /* elements of a whole block */
    int64_t block_tokens, kv_heads, group, head_size, half;
    const int32_t *table; /* [rows, table_stride] block ids */
    int64_t table_stride;
    const int32_t *table_rows, *query_start, *context_tokens;
    const Item *items;
    int64_t item_count;
    const Merge *merges;
    int64_t merge_count;
    float *scratch; /* [threads, scratch_floats] */
    int64_t scratch_floats, max_rows;
    float *parts; /* [slots, kv_heads, group, 2 + padded]: top, sum, weighted values */
    int64_t threads;
} Job;

INLINE int64_t padded_head(int64_t head_size) { return (head_size + VW - 1) / VW * VW; }

/* Query rows of one KV head, scaled so that a score is a power of two. */
INLINE void gather_queries(const Job *job, const Item *item, int64_t head, float *to) {
    float scale = 1.44269504088896341f / sqrtf((float)job->head_size);
    int64_t first = job->query_start[item->row] + item->first, length = job->group * job->head_size;
    for (int64_t i = 0; i < item->queries; i++) {
        const float *from = job->q + (first + i) * job->q_stride + head * length;
        for (int64_t j = 0; j < length; j++) to[i * length + j] = from[j] * scale;
    }
}

/* Positions of a tile that a row attends to. */
INLINE int64_t seen(int64_t before, int64_t group, int64_t row, int64_t count) {
    int64_t bound = before + row / group + 1;
    return bound < 0 ? 0 : bound < count ? bound : count;
}

/* One KV head, one tile of `count` positions. `before`: positions between the tile's start and the first query. */
INLINE void attend_tile(const Rows *w, const char *const *keys, const char *const *values, int64_t offset,
                        int64_t count, int64_t before, State state, int half) {
    for (int64_t r = 0; r < w->rows * w->padded; r++) state.acc[r] = 0.0f;
    for (int64_t strip = 0; strip < count; strip += STRIP) {
        int64_t length = count - strip < STRIP ? count - strip : STRIP;
        pack_keys(w, keys + strip, offset, length, half);
        for (int64_t r = 0; r < w->rows; r += REGISTER_ROWS) {
            int64_t rows = w->rows - r < REGISTER_ROWS ? w->rows - r : REGISTER_ROWS;
            int64_t last = seen(before, w->group, r + rows - 1, count) - strip;
            score_rows(w->q + r * w->head_size, w->head_size, w->strip, w->scores + r * TILE + strip, rows,
                       last < length ? last : length);
        }
    }
    const char *wide_values[TILE];
    int widen = w->rows > DIRECT_ROWS || w->head_size != w->padded;
    if (widen) {
        for (int64_t t = 0; t < count; t++) {
            float *to = w->wide + t * w->padded;
            int64_t d = 0;
            for (; d + VW <= w->head_size; d += VW) v_store(to + d, load_as_float(values[t] + offset, d, half));
            for (; d < w->padded; d++) to[d] = d < w->head_size ? get_as_float(values[t] + offset, d, half) : 0.0f;
            wide_values[t] = (const char *)to;
        }
    }
    for (int64_t r = 0; r < w->rows; r += REGISTER_ROWS) {
        int64_t rows = w->rows - r < REGISTER_ROWS ? w->rows - r : REGISTER_ROWS;
        int64_t shared = seen(before, w->group, r, count);
        for (int64_t i = r; i < r + rows; i++) {
            int64_t n = seen(before, w->group, i, count);
            if (n > 0) soften(w->scores + i * TILE, n, state.top + i, state.sum + i);
        }
        if (widen)
            weigh_rows(w, w->scores + r * TILE, wide_values, 0, 0, shared, state.acc + r * w->padded, rows, 0);
        else
            weigh_rows(w, w->scores + r * TILE, values, offset, 0, shared, state.acc + r * w->padded, rows, half);
        for (int64_t i = r; i < r + rows; i++) {
            int64_t n = seen(before, w->group, i, count);
            if (n <= shared) continue;
            if (widen)
                weigh_rows(w, w->scores + i * TILE, wide_values, 0, shared, n, state.acc + i * w->padded, 1, 0);
            else
                weigh_rows(w, w->scores + i * TILE, values, offset, shared, n, state.acc + i * w->padded, 1, half);
        }
    }
}

/* Where the keys and values of positions start..start+count-1 are. */
INLINE void locate(const Job *job, int32_t row, int64_t start, int64_t count, const char **keys, const char **values) {
    const int32_t *table = job->table + (int64_t)job->table_rows[row] * job->table_stride;
    int64_t element = job->half ? 2 : 4, token = job->kv_heads * job->head_size * element;
    int64_t block = start / job->block_tokens, place = start % job->block_tokens;
    for (int64_t t = 0; t < count; block++, place = 0) {
        const char *key = job->pool + table[block] * job->block_stride * element + place * token;
        for (; place < job->block_tokens && t < count; place++, t++, key += token) {
            keys[t] = key;
            values[t] = key + job->block_tokens * token;
        }
    }
}

INLINE void finish_row(float *out, const float *acc, float sum, int64_t head_size) {
    float share = 1.0f / sum;
    for (int64_t d = 0; d < head_size; d++) out[d] = acc[d] * share;
}

INLINE float *output(const Job *job, int64_t token, int64_t kv_head, int64_t in_group) {
    return job->out + token * job->out_stride + (kv_head * job->group + in_group) * job->head_size;
}

/* Sums of a part: what `fold` needs, for `merge`. */
INLINE float *part_of(const Job *job, int64_t slot, int64_t head) {
    return job->parts + (slot * job->kv_heads + head) * job->group * (2 + padded_head(job->head_size));
}

/* Lays the thread's scratch out: state and queries of each head of the item, then what one tile needs. */
INLINE float *carve(float **free, int64_t floats) {
    float *start = *free;
    *free += (floats + 15) / 16 * 16;
    return start;
}

INLINE void run_item(const Job *job, const Item *item, float *scratch, int half) {
    int64_t rows = item->queries * job->group, padded = padded_head(job->head_size);
    Rows w = {.rows = rows, .group = job->group, .head_size = job->head_size, .padded = padded, .half = half};
    w.strip = carve(&scratch, job->head_size * STRIP);
    w.scores = carve(&scratch, job->max_rows * TILE);
    w.wide = carve(&scratch, TILE * padded);
    State fresh = {carve(&scratch, rows), carve(&scratch, rows), carve(&scratch, rows * padded)};
    float *queries = carve(&scratch, item->heads * rows * job->head_size);
    float *tops = carve(&scratch, item->heads * rows), *sums = carve(&scratch, item->heads * rows);
    float *accs = carve(&scratch, item->heads * rows * padded);
    for (int64_t h = 0; h < item->heads; h++)
        gather_queries(job, item, item->head + h, queries + h * rows * job->head_size);

    int64_t count_of_row = job->query_start[item->row + 1] - job->query_start[item->row];
    int64_t first_position = job->context_tokens[item->row] - count_of_row + item->first;
    int64_t end = first_position + item->queries;
    int64_t start = item->tile < 0 ? 0 : (int64_t)item->tile * TILE;
    if (item->tile >= 0 && end > start + TILE) end = start + TILE;
    for (int64_t tile = start; tile < end; tile += TILE) {
        const char *keys[TILE], *values[TILE];
        int64_t count = end - tile < TILE ? end - tile : TILE, before = first_position - tile;
        locate(job, item->row, tile, count, keys, values);
        for (int64_t h = 0; h < item->heads; h++) {
            State state = {tops + h * rows, sums + h * rows, accs + h * rows * padded};
            int64_t offset = (item->head + h) * job->head_size * (half ? 2 : 4);
            w.q = queries + h * rows * job->head_size;
            attend_tile(&w, keys, values, offset, count, before, tile == start ? state : fresh, half);
            if (tile == start) continue;
            for (int64_t r = 0; r < rows; r++)
                if (seen(before, job->group, r, count) > 0)
                    fold(state.top + r, state.sum + r, state.acc + r * padded, fresh.top[r], fresh.sum[r],
                         fresh.acc + r * padded, padded);
        }
    }
    for (int64_t h = 0; h < item->heads; h++)
        for (int64_t r = 0; r < rows; r++) {
            const float *acc = accs + (h * rows + r) * padded;
            int64_t token = job->query_start[item->row] + item->first + r / job->group;
            if (item->tile < 0) {
                finish_row(output(job, token, item->head + h, r % job->group), acc, sums[h * rows + r], job->head_size);
            } else {
                float *part = part_of(job, item->slot, item->head + h) + r * (2 + padded);
                part[0] = tops[h * rows + r];
                part[1] = sums[h * rows + r];
                memcpy(part + 2, acc, padded * sizeof(float));
            }
        }
}

/* Folds the parts of a single query, all heads, into its output. */
INLINE void merge(const Job *job, const Merge *merge) {
    int64_t padded = padded_head(job->head_size), token = job->query_start[merge->row];
    for (int64_t head = 0; head < job->kv_heads; head++)
        for (int64_t g = 0; g < job->group; g++) {
            float *total = part_of(job, merge->slot, head) + g * (2 + padded);
            for (int32_t i = 1; i < merge->parts; i++) {
                const float *part = part_of(job, merge->slot + i, head) + g * (2 + padded);
                fold(total, total + 1, total + 2, part[0], part[1], part + 2, padded);
            }
            finish_row(output(job, token, head, g), total + 2, total[1], job->head_size);
        }
}

/* Floats that a thread needs for items of at most max_rows query rows a head, max_total over all heads. */
int64_t NAME(attend_scratch)(int64_t head_size, int64_t max_rows, int64_t max_total) {
    int64_t padded = padded_head(head_size);
    return head_size * STRIP + TILE * padded + max_rows * (TILE + padded + 2) + max_total * (head_size + padded + 2) +
           16 * 10; /* each array starts on a cache line */
}

/* Floats of a part: one query, one KV head. */
int64_t NAME(attend_part)(int64_t head_size, int64_t group) { return group * (2 + padded_head(head_size)); }

void NAME(attend)(const Job *job) {
    int threads = (int)job->threads;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
    {
        float *scratch = job->scratch + THREAD() * job->scratch_floats;
#if defined(_OPENMP)
#pragma omp for schedule(dynamic, 1)
#endif
        for (int64_t i = 0; i < job->item_count; i++) {
            if (job->half)
                run_item(job, job->items + i, scratch, 1);
            else
                run_item(job, job->items + i, scratch, 0);
        }
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
        for (int64_t i = 0; i < job->merge_count; i++) merge(job, job->merges + i);
    }
}
