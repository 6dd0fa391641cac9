/* Attention of one query a row over a paged pool, all query heads of a KV head together.
 *
 * pool: [blocks, layers, 2, BLOCK_TOKENS, kv_heads, HEAD_SIZE]; `pool` is where the layer's keys begin, its values lie
 * `values` elements behind. Strides and offsets are in elements.
 *
 * Grid [kv_heads, rows, splits], 128 threads. A thread block computes a row's context from block `chunk * split` of its
 * table on: `chunk` blocks, the last split all that is left; with chunk 0 the context is divided evenly over the splits.
 * Its four warps take the blocks of 16 tokens in turn and fold what they have at the end. With one split the result goes
 * to `out`; with more to `parts` [rows, heads, splits, HEAD_SIZE], as sums that are not divided, beside `sums`
 * [rows, heads, splits, 2]: the largest score (base 2) and the sum of the weights. merge_splits puts those together; a
 * split that has no blocks writes nothing.
 * Sums of a row run in an order that depends on its own context, chunk and splits only.
 *
 * Up to 8 query heads are the 8 columns (or rows) of tensor-core tiles: scores = Q K^T of [8 of 16, 16 tokens], then
 * out^T += V^T P^T of [HEAD_SIZE, 8]. What a lane has of the scores is then what it needs of the weights, so nothing
 * moves between lanes. Sums over the head run in a permuted order, the same for queries and keys, so that a lane's part
 * of a key lies in 16 adjacent bytes; so do its dimensions of values. Weights are split into two halves of the pool's
 * type, the rounded one and what is left of it, so that they count with twice its precision.
 *
 * Tokens behind the context are neither read nor counted: values there may be NaN, and 0 times NaN is NaN.
 */
#define GROUP_MAX 8
#define WARPS 4
#define CHUNKS (HEAD_SIZE / 32) /* of 16 bytes a lane has of a key, a query */
#define HALVES (HEAD_SIZE / 64) /* of 16 bytes a lane has of a value */
#define TILES (HEAD_SIZE / 16)  /* of 16 dimensions */
/* What a warp, and then a thread block, has so far of one row and KV head. The sums are those of dimension
 * 64 (j / 4) + 8 g + 2 (j % 4) for queries 2t and 2t + 1, then of the next dimension. */
typedef struct {
    float sums[TILES][4];
    float peak, weight; /* of query g; `weight` of this lane's tokens only */
} Partial;

/* The lane's part of the keys of tokens g and g + 8 of a block, of which the context has `tokens` or all. */
__device__ __forceinline__ void load_keys(uint4 keys[2][CHUNKS], const u16 *block, int token_stride, int tokens) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int token = g + 8 * half;
        const u16 *from = block + (token * token_stride + 8 * t);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            keys[half][c] = token < tokens ? load16_once(from + 32 * c) : make_uint4(0, 0, 0, 0);
    }
}

/* The lane's part of the values of tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of a block. */
__device__ __forceinline__ void load_values(uint4 values[4][HALVES], const u16 *block, int token_stride, int tokens) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = 2 * t + i % 2 + 8 * (i / 2);
        const u16 *from = block + (token * token_stride + 8 * g);
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            values[i][h] = token < tokens ? load16_once(from + 64 * h) : make_uint4(0, 0, 0, 0);
    }
}

/* Scores of query g, base 2: of tokens 2t and 2t + 1, then 2t + 8 and 2t + 9. */
__device__ __forceinline__ void score(float scores[4], const uint4 query[CHUNKS], const uint4 keys[2][CHUNKS],
                                      float scale, int tokens) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            mma(c, query[i].x, 0, query[i].y, 0, keys[half][i].x, keys[half][i].y);
            mma(c, query[i].z, 0, query[i].w, 0, keys[half][i].z, keys[half][i].w);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            scores[2 * half + i] = 8 * half + 2 * t + i < tokens ? c[i] * scale : NEVER;
    }
}

/* Turns scores into weights against the largest so far, and scales down what was summed before. */
__device__ __forceinline__ void weigh(Partial *have, float scores[4]) {
    const int t = threadIdx.x % 4;
    float peak = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
    peak = fmaxf(peak, shuffle_xor(peak, 1));
    peak = fmaxf(peak, shuffle_xor(peak, 2));
    peak = fmaxf(peak, have->peak);
    const float before = part_scale(have->peak, peak);
    have->peak = peak;
    have->weight *= before;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        scores[i] = exp2_fast(scores[i] - peak);
        have->weight += scores[i];
    }
    const float before0 = shuffle(before, 8 * t), before1 = shuffle(before, 8 * t + 4);
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        have->sums[j][0] *= before0;
        have->sums[j][1] *= before1;
        have->sums[j][2] *= before0;
        have->sums[j][3] *= before1;
    }
}

__device__ __forceinline__ u32 word(uint4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

/* Adds the values of a block times their weights. */
__device__ __forceinline__ void accumulate(Partial *have, const float weights[4], const uint4 values[4][HALVES]) {
    const u32 near0 = pack(weights[0], weights[1]), near1 = pack(weights[2], weights[3]);
    const u32 rest0 = pack(weights[0] - first_of(near0), weights[1] - second_of(near0));
    const u32 rest1 = pack(weights[2] - first_of(near1), weights[3] - second_of(near1));
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = word(values[i][j / 4], j % 4);
        const u32 a0 = low_halves(v[0], v[1]), a1 = high_halves(v[0], v[1]);
        const u32 a2 = low_halves(v[2], v[3]), a3 = high_halves(v[2], v[3]);
        mma(have->sums[j], a0, a1, a2, a3, near0, near1);
        mma(have->sums[j], a0, a1, a2, a3, rest0, rest1);
    }
}

/* What this warp has of blocks `first + warp`, then every WARPS-th, up to `last`. Keys are asked for one turn ahead, ids
 * of blocks two; values while the scores are computed. A last block that the context does not fill comes by itself. */
__device__ __forceinline__ void attend(Partial *have, const uint4 query[CHUNKS], const u16 *pool, i64 block_stride,
                                       int values_offset, int token_stride, const int *table, int first, int last,
                                       int context, float scale) {
    const int whole = min(last, context / BLOCK_TOKENS);
    int block = first + threadIdx.x / WARP;
    uint4 keys[2][CHUNKS], values[4][HALVES];
    float scores[4];
    const u16 *at = pool;
    int next = 0;
    if (block < whole) {
        at = pool + table[block] * block_stride;
        load_keys(keys, at, token_stride, BLOCK_TOKENS);
        if (block + WARPS < whole) next = table[block + WARPS];
    }
#pragma unroll 1
    for (; block < whole; block += WARPS) {
        load_values(values, at + values_offset, token_stride, BLOCK_TOKENS);
        score(scores, query, keys, scale, BLOCK_TOKENS);
        if (block + WARPS < whole) {
            at = pool + next * block_stride;
            load_keys(keys, at, token_stride, BLOCK_TOKENS);
            if (block + 2 * WARPS < whole) next = table[block + 2 * WARPS];
        }
        weigh(have, scores);
        accumulate(have, scores, values);
    }
    if (block < last) {
        const int tokens = context - block * BLOCK_TOKENS;
        at = pool + table[block] * block_stride;
        load_keys(keys, at, token_stride, tokens);
        load_values(values, at + values_offset, token_stride, tokens);
        score(scores, query, keys, scale, tokens);
        weigh(have, scores);
        accumulate(have, scores, values);
    }
}

/* Folds the warps' partials into [GROUP_MAX, HEAD_SIZE] sums in shared memory; `peaks` and `weights` are then those of
 * all. Dimensions of a thread: threadIdx.x, and on. */
typedef struct {
    float sums[WARPS][GROUP_MAX][HEAD_SIZE + 4];
    float peaks[WARPS][GROUP_MAX], weights[WARPS][GROUP_MAX];
} Shared;

__device__ __forceinline__ void share(Shared *shared, const Partial *mine) {
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    float weight = mine->weight;
    weight += shuffle_xor(weight, 1);
    weight += shuffle_xor(weight, 2);
    if (t == 0) {
        shared->peaks[warp][g] = mine->peak;
        shared->weights[warp][g] = weight;
    }
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        const int dimension = 64 * (j / 4) + 8 * g + 2 * (j % 4);
#pragma unroll
        for (int i = 0; i < 4; i++) shared->sums[warp][2 * t + i % 2][dimension + i / 2] = mine->sums[j][i];
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP, HEAD_SIZE == 128 ? 2 : 4)
    paged_decode(void *out, i64 out_stride, int out_float, float *parts, float *sums, const void *q, i64 q_stride,
                 const void *pool, i64 block_stride, int values_offset, int token_stride, const int *table,
                 i64 table_stride, const int *table_rows, const int *tokens, const int *contexts, int group, int chunk,
                 float scale) {
    __shared__ Shared shared;
    const int head = blockIdx.x, row = blockIdx.y, split = blockIdx.z, splits = gridDim.z;
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const int context = contexts[row], blocks = blocks_of(context), each = split_blocks(blocks, splits, chunk);
    const int first = min(blocks, split * each);
    const int last = split == splits - 1 ? blocks : min(blocks, first + each);
    if (splits > 1 && first == last) return; /* merge_splits does not ask for it */

    Partial mine;
    mine.peak = NEVER;
    mine.weight = 0.0f;
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) mine.sums[j][i] = 0.0f;
    uint4 query[CHUNKS];
    const u16 *queries = (const u16 *)q + place_of(tokens, row) * q_stride + head * group * HEAD_SIZE;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        query[c] = g < group ? load16(queries + g * HEAD_SIZE + 32 * c + 8 * t) : make_uint4(0, 0, 0, 0);
    attend(&mine, query, (const u16 *)pool + head * HEAD_SIZE, block_stride, values_offset, token_stride,
           table + place_of(table_rows, row) * table_stride, first, last, context, scale);

    share(&shared, &mine);
    __syncthreads();
    const int heads = gridDim.x * group;
    for (int i = threadIdx.x; i < group * HEAD_SIZE; i += WARPS * WARP) {
        const int member = i / HEAD_SIZE, dimension = i % HEAD_SIZE;
        float peak = NEVER, weight = 0.0f, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, shared.peaks[w][member]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float by = part_scale(shared.peaks[w][member], peak);
            weight += by * shared.weights[w][member];
            sum += by * shared.sums[w][member][dimension];
        }
        if (splits == 1) {
            store_result(out, place_of(tokens, row) * out_stride + head * group * HEAD_SIZE + i, out_float, sum, weight);
        } else {
            const i64 part = ((i64)row * heads + head * group + member) * splits + split;
            parts[part * HEAD_SIZE + dimension] = sum;
            if (dimension < 2) sums[2 * part + dimension] = dimension == 0 ? peak : weight;
        }
    }
}
