/* Keys and values into the pool, and whole blocks from place to place. */

/* Stores k and v of a token, `width` elements each (a multiple of 8), at slot block * BLOCK_TOKENS + place; -1 is
 * skipped. Grid [tokens]. `pool` is where the layer's keys begin; strides and offsets are in elements. */
extern "C" __global__ void __launch_bounds__(128)
    write_kv(void *pool, i64 block_stride, i64 values_offset, i64 token_stride, const void *k, i64 k_stride,
             const void *v, i64 v_stride, const i64 *slots, int width) {
    const i64 token = blockIdx.x, slot = slots[token];
    if (slot < 0) return;
    u16 *to = (u16 *)pool + slot / BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * token_stride;
    const u16 *keys = (const u16 *)k + token * k_stride, *values = (const u16 *)v + token * v_stride;
    for (int i = 8 * threadIdx.x; i < width; i += 8 * blockDim.x) {
        store16(to + i, load16(keys + i));
        store16(to + values_offset + i, load16(values + i));
    }
}

#define IN_FLIGHT 4

/* Copies `bytes` (a multiple of 16) of each block; no target is a source. Strides are in bytes. Without `sources` or
 * `targets` the blocks lie one after another there: a gather, a scatter. Grid [blocks, pieces]. */
extern "C" __global__ void __launch_bounds__(256)
    move_blocks(void *target, i64 target_stride, const i64 *targets, const void *source, i64 source_stride,
                const i64 *sources, i64 bytes) {
    const i64 block = blockIdx.x;
    char *to = (char *)target + (targets == nullptr ? block : targets[block]) * target_stride;
    const char *from = (const char *)source + (sources == nullptr ? block : sources[block]) * source_stride;
    const i64 step = 16 * (i64)blockDim.x;
    for (i64 at = blockIdx.y * IN_FLIGHT * step + 16 * threadIdx.x; at < bytes; at += gridDim.y * IN_FLIGHT * step) {
        uint4 x[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (at + i * step < bytes) x[i] = load16_once(from + at + i * step);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (at + i * step < bytes) store16(to + at + i * step, x[i]);
    }
}
