/* Linear layers over packed half-precision weights: out = x * weights + bias, sums in single precision.
 *
 * Weights lie in panels of PANEL outputs: packed[panel][input][PANEL], the last panel filled up with zeros. An output
 * is one chain of fused products over the inputs, from first to last. How many rows share a register tile, and which
 * thread takes which panel, changes nothing of it; so any number of rows gives the same bits.
 */
#include <stdint.h>

#include "parallel.h"
#include "vec.h"

#define PANEL (VN * VW)
#define TILE_ROWS 6      /* rows of a register tile */
#define BLOCK_ROWS 96    /* rows that pass by a panel while it is in the second-level cache */
#define AHEAD_INPUTS 16  /* inputs whose weights are asked for before they are needed */
#define HALVES_A_LINE 32 /* half-precision numbers in a cache line */

/* One row's outputs of a panel, of which the first `columns` are wanted. */
INLINE void put(const vf *sums, const float *bias, float *out, int64_t columns, int add) {
    float all[PANEL];
    if (columns == PANEL) {
        for (int j = 0; j < VN; j++) {
            vf value = bias ? sums[j] + v_load(bias + j * VW) : sums[j];
            v_store(out + j * VW, add ? v_load(out + j * VW) + value : value);
        }
        return;
    }
    for (int j = 0; j < VN; j++) v_store(all + j * VW, sums[j]);
    for (int64_t c = 0; c < columns; c++) {
        float value = bias ? all[c] + bias[c] : all[c];
        out[c] = add ? out[c] + value : value;
    }
}

INLINE void multiply(const float *x, int64_t x_stride, const uint16_t *panel, int64_t inputs, const float *bias,
                     float *out, int64_t out_stride, int64_t columns, int add, int rows) {
    vf sums[TILE_ROWS][VN];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < VN; j++) sums[r][j] = v_set(0.0f);
    for (int64_t i = 0; i < inputs; i++, panel += PANEL) {
        vf w[VN];
        for (int j = 0; j < PANEL; j += HALVES_A_LINE) __builtin_prefetch(panel + AHEAD_INPUTS * PANEL + j, 0, 3);
        for (int j = 0; j < VN; j++) w[j] = v_load_half(panel + j * VW);
        for (int r = 0; r < rows; r++) {
            vf a = v_set(x[r * x_stride + i]);
            for (int j = 0; j < VN; j++) sums[r][j] = v_fma(a, w[j], sums[r][j]);
        }
    }
    for (int r = 0; r < rows; r++) put(sums[r], bias, out + r * out_stride, columns, add);
}

static void multiply_rows(const float *x, int64_t x_stride, const uint16_t *panel, int64_t inputs, const float *bias,
                          float *out, int64_t out_stride, int64_t columns, int add, int64_t rows) {
#define CALL(n) multiply(x, x_stride, panel, inputs, bias, out, out_stride, columns, add, n)
    switch (rows) {
        case 1: CALL(1); break;
        case 2: CALL(2); break;
        case 3: CALL(3); break;
        case 4: CALL(4); break;
        case 5: CALL(5); break;
        default: CALL(6); break;
    }
#undef CALL
}

/* x [rows, inputs], out [rows, outputs]; strides are floats between rows. `bias` may be null; `add`: to what is in
 * out. Panels are taken by whichever thread is free: a processor that is busy elsewhere holds up one panel only. */
void NAME(linear)(const float *x, int64_t x_stride, const uint16_t *packed, const float *bias, float *out,
                  int64_t out_stride, int64_t rows, int64_t inputs, int64_t outputs, int add, int threads) {
    int64_t panels = (outputs + PANEL - 1) / PANEL, blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    DYNAMIC_FOR(threads)
    for (int64_t item = 0; item < blocks * panels; item++) {
        int64_t first = item / panels * BLOCK_ROWS, column = item % panels * PANEL;
        int64_t end = first + BLOCK_ROWS < rows ? first + BLOCK_ROWS : rows;
        int64_t columns = outputs - column < PANEL ? outputs - column : PANEL;
        for (int64_t r = first; r < end; r += TILE_ROWS)
            multiply_rows(x + r * x_stride, x_stride, packed + column * inputs, inputs, bias ? bias + column : 0,
                          out + r * out_stride + column, out_stride, columns, add,
                          end - r < TILE_ROWS ? end - r : TILE_ROWS);
    }
}

/* Outputs of a panel. */
int64_t NAME(linear_panel)(void) { return PANEL; }
