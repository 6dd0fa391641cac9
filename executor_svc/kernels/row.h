/* One row of a network: each is computed by itself, in an order that its length alone fixes. */
#ifndef JITNEY_ROW_H
#define JITNEY_ROW_H

#include "vec.h"

/* to = from / sqrt(mean(from^2) + epsilon) * weight; `to` may be `from` */
INLINE void norm_row(const float *from, const float *weight, float epsilon, float *to, int64_t width) {
    int64_t whole = width - width % VW;
    vf squares = {0};
    for (int64_t i = 0; i < whole; i += VW) squares = v_fma(v_load(from + i), v_load(from + i), squares);
    float sum = v_sum(squares);
    for (int64_t i = whole; i < width; i++) sum += from[i] * from[i];
    float scale = 1.0f / sqrtf(sum / (float)width + epsilon);
    for (int64_t i = 0; i < whole; i += VW) v_store(to + i, v_load(from + i) * v_set(scale) * v_load(weight + i));
    for (int64_t i = whole; i < width; i++) to[i] = from[i] * scale * weight[i];
}

/* Rotary embedding of a head in place, two halves: (a, b) -> (a cos - b sin, b cos + a sin). */
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

/* silu(gate) * up */
INLINE vf silu_times(vf gate, vf up) {
    vf power = gate * v_set(-1.44269504088896341f);
    vf e = v_exp2(v_pick(power < v_set(126.0f), power, v_set(126.0f)));
    return gate / (v_set(1.0f) + e) * up;
}

INLINE void silu_row(const float *gate, const float *up, float *to, int64_t width) {
    int64_t whole = width - width % VW;
    for (int64_t i = 0; i < whole; i += VW) v_store(to + i, silu_times(v_load(gate + i), v_load(up + i)));
    for (int64_t i = whole; i < width; i++) to[i] = silu_times(v_set(gate[i]), v_set(up[i]))[0];
}

/* The first index of the largest element; NaN is never the largest. */
INLINE int64_t argmax_row(const float *from, int64_t width) {
    int64_t whole = width - width % VW;
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
    return found;
}

#endif
