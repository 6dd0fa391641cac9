/* Numbers on their way into the KV pool. */
#ifndef JITNEY_POOL_H
#define JITNEY_POOL_H

#include "vec.h"

/* `count` floats to elements index.. of the pool, rounded if it is of half precision. */
INLINE void round_row(const float *from, char *pool, int64_t index, int64_t count, int half) {
    if (!half) {
        memcpy((float *)pool + index, from, count * sizeof(float));
        return;
    }
    uint16_t *to = (uint16_t *)pool + index;
    int64_t i = 0;
    for (; i + VW <= count; i += VW) v_store_half(to + i, v_load(from + i));
    for (; i < count; i++) to[i] = float_to_half(from[i]);
}

/* Keys and values [width] of a token to their slot; -1 is skipped. `pool` is at the layer's keys of block 0. */
INLINE void store_kv(char *pool, int64_t half, int64_t block_stride, int64_t block_tokens, int64_t width, int64_t slot,
                     const float *k, const float *v) {
    if (slot < 0) return;
    int64_t index = slot / block_tokens * block_stride + slot % block_tokens * width;
    round_row(k, pool, index, width, (int)half);
    round_row(v, pool, index + block_tokens * width, width, (int)half);
}

#endif
