/* Puts the splits of paged_decode together, in the order of the context: grid [heads, rows], HEAD_SIZE threads. */

/* Where a row's query lies, or its table: as the index says, or in the same order. */
__device__ __forceinline__ i64 place_of(const int *index, int row) { return index == nullptr ? row : index[row]; }

/* sum / weight, 0 of no tokens, as float32 or as an element. */
__device__ __forceinline__ void store_result(void *out, i64 index, int out_float, float sum, float weight) {
    const float x = weight == 0.0f ? 0.0f : sum / weight;
    if (out_float)
        ((float *)out)[index] = x;
    else
        ((u16 *)out)[index] = (u16)(pack(x, 0.0f) & 0xffffu);
}

/* How many blocks of a context each split has: `chunk`, or as many as divide it evenly; the last has what is left. */
__device__ __forceinline__ int split_blocks(int blocks, int splits, int chunk) {
    return chunk > 0 ? chunk : (blocks + splits - 1) / splits;
}

__device__ __forceinline__ int blocks_of(int context) { return (context + BLOCK_TOKENS - 1) / BLOCK_TOKENS; }

/* What a part with this largest score counts beside one with `peak`; nothing if it has no tokens. */
__device__ __forceinline__ float part_scale(float part_peak, float peak) {
    return part_peak == NEVER ? 0.0f : exp2_fast(part_peak - peak);
}

extern "C" __global__ void __launch_bounds__(HEAD_SIZE)
    merge_splits(void *out, i64 out_stride, int out_float, const float *parts, const float *sums, const int *tokens,
                 const int *contexts, int splits, int chunk) {
    const int head = blockIdx.x, row = blockIdx.y, heads = gridDim.x;
    const i64 first = ((i64)row * heads + head) * splits;
    const int blocks = blocks_of(contexts[row]), each = split_blocks(blocks, splits, chunk);
    const int used = blocks == 0 ? 0 : min(splits, (blocks + each - 1) / each);
    float peak = NEVER, weight = 0.0f, sum = 0.0f;
    for (int s = 0; s < used; s++) peak = fmaxf(peak, sums[2 * (first + s)]);
    for (int s = 0; s < used; s++) {
        const float scale = part_scale(sums[2 * (first + s)], peak);
        weight += scale * sums[2 * (first + s) + 1];
        sum += scale * parts[(first + s) * HEAD_SIZE + threadIdx.x];
    }
    store_result(out, place_of(tokens, row) * out_stride + (i64)head * HEAD_SIZE + threadIdx.x, out_float, sum, weight);
}
