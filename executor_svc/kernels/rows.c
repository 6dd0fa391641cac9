/* Row-wise operations of a Llama layer over many rows.
 *
 * Strides are in floats, between rows; the elements of a row lie side by side.
 */
#include <stdint.h>

#include "parallel.h"
#include "row.h"
#include "vec.h"

/* out = x / sqrt(mean(x^2) + epsilon) * weight */
void NAME(share_rms_norm)(const float *x, int64_t x_stride, const float *weight, float epsilon, float *out,
                          int64_t out_stride, int64_t rows, int64_t width, Worker *worker) {
    SHARE_ROWS(worker, r, rows) norm_row(x + r * x_stride, weight, epsilon, out + r * out_stride, width);
}

void NAME(rms_norm)(const float *x, int64_t x_stride, const float *weight, float epsilon, float *out,
                    int64_t out_stride, int64_t rows, int64_t width, int threads) {
    ROWS_TOGETHER(threads, r, rows) norm_row(x + r * x_stride, weight, epsilon, out + r * out_stride, width);
}

/* Rotary embedding in place, two halves: (a, b) -> (a cos - b sin, b cos + a sin). Tables are [positions, half]. */
void NAME(rotary)(float *q, int64_t q_stride, int64_t q_heads, float *k, int64_t k_stride, int64_t k_heads,
                  int64_t head_size, const float *cosines, const float *sines, const int32_t *positions, int64_t rows,
                  int threads) {
    int64_t half = head_size / 2;
    ROWS_TOGETHER(threads, r, rows) {
        const float *cosine = cosines + positions[r] * half, *sine = sines + positions[r] * half;
        for (int64_t h = 0; h < q_heads; h++) rotate_head(q + r * q_stride + h * head_size, cosine, sine, half);
        for (int64_t h = 0; h < k_heads; h++) rotate_head(k + r * k_stride + h * head_size, cosine, sine, half);
    }
}

/* out = silu(gate) * up, where a row of gate_up is gate [width], then up [width] */
void NAME(silu_mul)(const float *gate_up, int64_t stride, float *out, int64_t out_stride, int64_t rows, int64_t width,
                    int threads) {
    ROWS_TOGETHER(threads, r, rows)
        silu_row(gate_up + r * stride, gate_up + r * stride + width, out + r * out_stride, width);
}

/* The first index of the largest element of each row; NaN is never the largest. */
void NAME(argmax)(const float *x, int64_t stride, int64_t *out, int64_t rows, int64_t width, int threads) {
    ROWS_TOGETHER(threads, r, rows) out[r] = argmax_row(x + r * stride, width);
}
