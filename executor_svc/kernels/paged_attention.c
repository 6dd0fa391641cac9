/* Causal attention of a step's query rows over a paged, block-major pool of keys and values.
 *
 * pool: [blocks, layers, 2, kv_heads, ...], where keys are [head_size, block_tokens] and values [block_tokens,
 * head_size] (pool.h). Work comes as items: some queries of one plan row, for some KV heads. A long context of a single
 * query may be split into one item a tile ("part"), whose sums are folded afterwards in the order of the context, as an
 * unsplit item folds them.
 */
#include <stdint.h>

#include "attention.h"
#include "parallel.h"
#include "tile.h"

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

/* Where the keys and values of positions from..to-1 are; no more than a tile, none if from >= to. */
INLINE void locate(const Job *job, int32_t row, int64_t from, int64_t to, Tile *tile) {
    const int32_t *table = job->table + (int64_t)job->table_rows[row] * job->table_stride;
    int64_t element = job->half ? 2 : 4, row_bytes = job->head_size * element;
    int64_t values = job->block_tokens * job->kv_heads * row_bytes;
    int64_t block = from / job->block_tokens, place = from % job->block_tokens;
    tile->count = from < to ? least(to - from, TILE) : 0;
    for (int64_t t = 0; t < tile->count; block++, place = 0) {
        const char *start = job->pool + table[block] * job->block_stride * element;
        for (; place < job->block_tokens && t < tile->count; place++, t++) {
            tile->keys[t] = start + place * element;
            tile->values[t] = start + values + place * row_bytes;
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

/* Takes floats off the thread's scratch, from a cache line's start on. */
INLINE float *carve(float **free, int64_t floats) {
    float *start = *free;
    *free += (floats + 15) / 16 * 16;
    return start;
}

INLINE State carve_state(float **free, int64_t rows, int64_t padded) {
    State state = {carve(free, rows), carve(free, rows), carve(free, rows * padded)};
    return state;
}

INLINE State head_state(State all, int64_t head, int64_t rows, int64_t padded) {
    State state = {all.top + head * rows, all.sum + head * rows, all.acc + head * rows * padded};
    return state;
}

/* Output of an item that has seen its whole context, or its sums for `merge`. */
INLINE void finish_item(const Job *job, const Item *item, State all, int64_t rows, int64_t padded) {
    for (int64_t i = 0; i < item->heads * rows; i++) {
        int64_t head = item->head + i / rows, row = i % rows;
        int64_t token = job->query_start[item->row] + item->first + row / job->group;
        if (item->tile < 0) {
            finish_row(output(job, token, head, row % job->group), all.acc + i * padded, all.sum[i], job->head_size);
            continue;
        }
        float *part = part_of(job, item->slot, head) + row * (2 + padded);
        part[0] = all.top[i];
        part[1] = all.sum[i];
        memcpy(part + 2, all.acc + i * padded, padded * sizeof(float));
    }
}

/* The positions that an item reads: *start..end-1. */
INLINE int64_t bounds(const Job *job, const Item *item, int64_t *start) {
    int64_t row_queries = job->query_start[item->row + 1] - job->query_start[item->row];
    int64_t end = job->context_tokens[item->row] - row_queries + item->first + item->queries;
    *start = item->tile < 0 ? 0 : (int64_t)item->tile * TILE;
    return item->tile < 0 ? end : least(end, *start + TILE);
}

/* Meanwhile asks for what the item `then` begins with, which may be null. */
INLINE void run_item(const Job *job, const Item *item, const Item *then, float *scratch, int half) {
    int64_t rows = item->queries * job->group, padded = padded_head(job->head_size), heads = item->heads;
    int64_t head_bytes = job->block_tokens * job->head_size * (half ? 2 : 4), first_offset = item->head * head_bytes;
    Rows w = {rows, job->group, job->head_size, padded, .stride = job->block_tokens};
    w.strip = carve(&scratch, job->head_size * STRIP);
    w.scores = carve(&scratch, rows * TILE);
    w.wide = carve(&scratch, STRIP * padded);
    State later = carve_state(&scratch, rows, padded), all = carve_state(&scratch, heads * rows, padded);
    float *queries = carve(&scratch, heads * rows * job->head_size);
    for (int64_t h = 0; h < heads; h++)
        gather_queries(job, item, item->head + h, queries + h * rows * job->head_size);

    int64_t row_queries = job->query_start[item->row + 1] - job->query_start[item->row];
    int64_t first_position = job->context_tokens[item->row] - row_queries + item->first;
    int64_t start, then_start, end = bounds(job, item, &start);
    Tile tiles[2];
    locate(job, item->row, start, end, tiles);
    for (int64_t from = start, odd = 0; from < end; from += TILE, odd = !odd) {
        Tile *tile = tiles + odd, *next = tiles + !odd;
        int64_t next_offset = first_offset;
        locate(job, item->row, from + TILE, end, next);
        if (from + TILE >= end && then) {
            int64_t then_end = bounds(job, then, &then_start);
            locate(job, then->row, then_start, then_end, next);
            next_offset = then->head * head_bytes;
        }
        for (int64_t h = 0; h < heads; h++) {
            State state = head_state(all, h, rows, padded);
            int64_t before = first_position - from, offset = first_offset + h * head_bytes;
            int last = h + 1 == heads, begins = from == start;
            w.q = queries + h * rows * job->head_size;
            attend_tile(&w, tile, offset, before, begins ? state : later, last ? next : tile,
                        last ? next_offset : offset + head_bytes, half);
            for (int64_t r = 0; r < rows && !begins; r++)
                if (seen(&w, before, r, tile->count))
                    fold(state.top + r, state.sum + r, state.acc + r * padded, later.top[r], later.sum[r],
                         later.acc + r * padded, padded);
        }
    }
    finish_item(job, item, all, rows, padded);
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
    return head_size * STRIP + STRIP * padded + max_rows * (TILE + padded + 2) + max_total * (head_size + padded + 2) +
           16 * 10; /* ten arrays, each from a cache line's start on */
}

/* Floats of a part: one query, one KV head. */
int64_t NAME(attend_part)(int64_t head_size, int64_t group) { return group * (2 + padded_head(head_size)); }

void NAME(share_attend)(const Job *job, Worker *worker) {
    float *scratch = job->scratch + worker->thread * job->scratch_floats;
    SHARE_FOR(worker, i, job->item_count, job->item_count) {
        int64_t soon = i + worker->threads; /* probably this thread's next one */
        const Item *item = job->items + i, *then = soon < job->item_count ? job->items + soon : NULL;
        if (job->half)
            run_item(job, item, then, scratch, 1);
        else
            run_item(job, item, then, scratch, 0);
    }
    SHARE_FOR(worker, i, job->merge_count, job->merge_count) merge(job, job->merges + i);
}

void NAME(attend)(const Job *job) {
    Phase phases[2] = {{0}, {0}};
    TOGETHER(job->threads) {
        Worker worker = enter(phases);
        NAME(share_attend)(job, &worker);
    }
}
