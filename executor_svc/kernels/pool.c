/* Rows and blocks of the KV pool: new keys and values, whole blocks copied, gathered and scattered. */
#include <stdint.h>

#include "parallel.h"
#include "pool.h"
#include "vec.h"

/* Keys and values [rows, kv_heads, head_size] to their slots; slot -1 is skipped. `pool` is at the layer's keys of block 0. */
void NAME(write_kv)(char *pool, int64_t half, int64_t block_stride, int64_t block_tokens,
                    int64_t kv_heads, int64_t head_size, const int64_t *slots, const float *k, int64_t k_stride,
                    const float *v, int64_t v_stride, int64_t rows, int threads) {
    ROWS_TOGETHER(threads, r, rows)
        store_kv(pool, half, block_stride, block_tokens, kv_heads, head_size, slots[r], k + r * k_stride,
                 v + r * v_stride);
}

/* The first row with a table entry, inside its context, that is no block of the pool; -1: none. */
int64_t NAME(check_table)(const int32_t *table, int64_t stride, const int32_t *table_rows, const int32_t *context_tokens,
                          int64_t rows, int64_t block_tokens, int64_t blocks) {
    for (int64_t r = 0; r < rows; r++) {
        const int32_t *entry = table + table_rows[r] * stride;
        int64_t used = (context_tokens[r] + block_tokens - 1) / block_tokens, outside = 0;
        for (int64_t i = 0; i < used; i++) outside += entry[i] < 0 || entry[i] >= blocks;
        if (outside) return r;
    }
    return -1;
}

/* Row from[i] of one array of rows to row to[i] of another; a missing index list counts up from 0. */
void NAME(move_rows)(const char *source, const int64_t *from, char *target, const int64_t *to, int64_t count,
                     int64_t row_bytes, int threads) {
    ROWS_TOGETHER(threads, i, count)
        memcpy(target + (to ? to[i] : i) * row_bytes, source + (from ? from[i] : i) * row_bytes, row_bytes);
}
