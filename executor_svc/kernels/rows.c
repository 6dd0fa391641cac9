/* Row-wise operations of a Llama layer. Each row is computed by itself, in an order that its length alone fixes.
 *
 * Strides are in floats, between rows; the elements of a row lie side by side.
 */
#include <stdint.h>

#include "parallel.h"
#include "vec.h"

static const float LOG2_E = 1.44269504088896341f;

/* out = x / sqrt(mean(x^2) + epsilon) * weight */
void NAME(rms_norm)(const float *x, int64_t x_stride, const float *weight, float epsilon, float *out,
                    int64_t out_stride, int64_t rows, int64_t width, int threads) {
    int64_t whole = width - width % VW;
    PARALLEL_FOR(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * x_stride;
        float *to = out + r * out_stride;
        vf squares = {0};
        for (int64_t i = 0; i < whole; i += VW) squares = v_fma(v_load(from + i), v_load(from + i), squares);
        float sum = v_sum(squares);
        for (int64_t i = whole; i < width; i++) sum += from[i] * from[i];
        float scale = 1.0f / sqrtf(sum / (float)width + epsilon);
        for (int64_t i = 0; i < whole; i += VW) v_store(to + i, v_load(from + i) * v_set(scale) * v_load(weight + i));
        for (int64_t i = whole; i < width; i++) to[i] = from[i] * scale * weight[i];
    }
}

INLINE void rotate_head(float *head, const float *cosine, const float *sine, int64_t half) {
    int64_t i = 0;
    for (; i + VW <= half; i += VW) {
        vf a = v_load(head + i), b = v_load(head + half + i), c = v_load(cosine + i), s = v_load(sine + i);
        v_store(head + i, a * c - b * s);
        v_store(head + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cosine[i] - b * sine[i];
        head[half + i] = b * cosine[i] + a * sine[i];
    }
}

/* Rotary embedding in place, two halves: (a, b) -> (a cos - b sin, b cos + a sin). Tables are [positions, half]. */
void NAME(rotary)(float *q, int64_t q_stride, int64_t q_heads, float *k, int64_t k_stride, int64_t k_heads,
                  int64_t head_size, const float *cosines, const float *sines, const int32_t *positions, int64_t rows,
                  int threads) {
    int64_t half = head_size / 2;
    PARALLEL_FOR(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *cosine = cosines + positions[r] * half, *sine = sines + positions[r] * half;
        for (int64_t h = 0; h < q_heads; h++) rotate_head(q + r * q_stride + h * head_size, cosine, sine, half);
        for (int64_t h = 0; h < k_heads; h++) rotate_head(k + r * k_stride + h * head_size, cosine, sine, half);
    }
}

INLINE vf silu_times(vf gate, vf up) {
    vf power = gate * v_set(-LOG2_E);
    vf e = v_exp2(v_pick(power < v_set(126.0f), power, v_set(126.0f)));
    return gate / (v_set(1.0f) + e) * up;
}

/* out = silu(gate) * up, where a row of gate_up is gate [width], then up [width] */
void NAME(silu_mul)(const float *gate_up, int64_t stride, float *out, int64_t out_stride, int64_t rows, int64_t width,
                    int threads) {
    int64_t whole = width - width % VW;
    PARALLEL_FOR(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + r * stride, *up = gate + width;
        float *to = out + r * out_stride;
        for (int64_t i = 0; i < whole; i += VW) v_store(to + i, silu_times(v_load(gate + i), v_load(up + i)));
        for (int64_t i = whole; i < width; i++) to[i] = silu_times(v_set(gate[i]), v_set(up[i]))[0];
    }
}

/* The first index of the largest element of each row; NaN is never the largest. */
void NAME(argmax)(const float *x, int64_t stride, int64_t *out, int64_t rows, int64_t width, int threads) {
    int64_t whole = width - width % VW;
    PARALLEL_FOR(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * stride;
        vf top = v_set(-INFINITY);
        vi where = v_set_int(0), index = v_lanes();
        for (int64_t i = 0; i < whole; i += VW, index += v_set_int(VW)) {
            vf value = v_load(from + i);
            vi larger = value > top;
            top = v_pick(larger, value, top);
            where = (larger & index) | (~larger & where);
        }
        float best = -INFINITY;
        int64_t found = 0;
        for (int lane = 0; lane < VW; lane++)
            if (top[lane] > best || (top[lane] == best && where[lane] < found)) best = top[lane], found = where[lane];
        for (int64_t i = whole; i < width; i++)
            if (from[i] > best) best = from[i], found = i;
        out[r] = found;
    }
}
