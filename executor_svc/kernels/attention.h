/* A step's attention, as the caller cuts it. */
#ifndef JITNEY_ATTENTION_H
#define JITNEY_ATTENTION_H

#include <stdint.h>

typedef struct {
    int32_t row;     /* of the plan */
    int32_t first;   /* first query of the row */
    int32_t queries;
    int32_t head;    /* first KV head */
    int32_t heads;
    int32_t tile;    /* the only tile to do; -1: all */
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
    int64_t scratch_floats;
    float *parts; /* [slots, kv_heads, group, 2 + padded]: top, sum, weighted values */
    int64_t threads;
} Job;

#endif
