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

/* `count` floats to elements index, index + stride and so on. */
INLINE void scatter_row(const float *from, char *pool, int64_t index, int64_t stride, int64_t count, int half) {
    for (int64_t i = 0; i < count; i += VW) {
        if (i + VW > count || !half) {
            int64_t end = least(i + VW, count);
            for (int64_t j = i; j < end; j++) round_row(from + j, pool, index + j * stride, 1, half);
            continue;
        }
        uint16_t halves[VW];
        v_store_half(halves, v_load(from + i));
        for (int j = 0; j < VW; j++) ((uint16_t *)pool)[index + (i + j) * stride] = halves[j];
    }
}

/* The key and the value [kv_heads, head_size] of a token to their slot; -1 is skipped. `pool` is at the layer's keys of
 * block 0. In a block keys are [kv_heads, head_size, block_tokens], so that a vector is one dimension of some positions,
 * which is what scores add up; values are [kv_heads, block_tokens, head_size]. */
INLINE void store_kv(char *pool, int64_t half, int64_t block_stride, int64_t block_tokens, int64_t kv_heads,
                     int64_t head_size, int64_t slot, const float *k, const float *v) {
    if (slot < 0) return;
    int64_t block = slot / block_tokens * block_stride, place = slot % block_tokens, head = head_size * block_tokens;
    scatter_row(k, pool, block + place, block_tokens, kv_heads * head_size, (int)half);
    for (int64_t h = 0; h < kv_heads; h++)
        round_row(v + h * head_size, pool, block + (kv_heads + h) * head + place * head_size, head_size, (int)half);
}

#endif
