/* Products over packed weights, spread over threads. Panels are taken by whichever thread is free: a processor that is
 * busy elsewhere holds up one panel only. What a panel and a register tile are: product.h. */
#include "network.h"
#include "parallel.h"
#include "product.h"
#include "row.h"

#define BLOCK_ROWS 96 /* rows that pass by a panel while it is in the second-level cache */
#define MOST_PIECES 64  /* a thread */
#define WIDE_TILES 4     /* tiles of rows for which a panel is widened first, if it fits: */
#define WIDE_INPUTS 2048
#define STREAM_PIECES 3  /* a thread, at least: with fewer, panels go one by one, so that no thread waits for long */

#if defined(ISA_AVX512)
#define VNNI 1
#else
#define VNNI 0
#endif

/* `wide`: the panel as floats, or null. */
static void multiply(const Matrix *m, int64_t panel, const Operand *x, int64_t first, float *tile, int64_t rows,
                     const char *next, const float *wide, int vnni) {
#define CALL(n)                                                                                    \
    case n:                                                                                        \
        if (wide) multiply_wide(m, wide, x, first, tile, n, next);                                 \
        else if (m->kind == HALF) multiply_half(m, panel, x, first, tile, n, next);                \
        else if (m->kind == INT8 && vnni) multiply_whole(m, panel, x, first, tile, n, next, INT8, VNNI); \
        else if (m->kind == INT8) multiply_whole(m, panel, x, first, tile, n, next, INT8, 0);      \
        else if (vnni) multiply_whole(m, panel, x, first, tile, n, next, INT16, VNNI);             \
        else multiply_whole(m, panel, x, first, tile, n, next, INT16, 0);                          \
        break;
    switch (rows) {
        CALL(1) CALL(2) CALL(3) CALL(4) CALL(5) CALL(6)
#if TILE_ROWS == 12
        CALL(7) CALL(8) CALL(9) CALL(10) CALL(11) CALL(12)
#endif
    }
#undef CALL
}

/* STREAMS panels at a time by the first `rows` rows; so many that their sums fit into registers. */
static void multiply_streams(const Matrix *m, int64_t panel, const Operand *x, float tiles[STREAMS][TILE_ROWS * PANEL],
                             int64_t rows, const char *next, int vnni) {
#define CALL(n)                                                                                      \
    case n:                                                                                          \
        if (m->kind == HALF) multiply_half_streams(m, panel, x, tiles, n, next);                     \
        else if (m->kind == INT8 && vnni) multiply_whole_streams(m, panel, x, tiles, n, next, INT8, VNNI); \
        else if (m->kind == INT8) multiply_whole_streams(m, panel, x, tiles, n, next, INT8, 0);      \
        else if (vnni) multiply_whole_streams(m, panel, x, tiles, n, next, INT16, VNNI);             \
        else multiply_whole_streams(m, panel, x, tiles, n, next, INT16, 0);                          \
        break;
    switch (rows) {
        CALL(1) CALL(2)
#if TILE_ROWS == 12
        CALL(3) CALL(4)
#endif
    }
#undef CALL
}

/* What is to be done with a tile: `how` of share_product. */
INLINE void finish(const float *tile, const float *bias, float *out, int64_t stride, int64_t rows, int64_t columns,
                   int add) {
    for (int64_t r = 0; r < rows; r++, tile += PANEL, out += stride)
        for (int64_t c = 0; c < columns; c++) {
            float value = bias ? tile[c] + bias[c] : tile[c];
            out[c] = add ? out[c] + value : value;
        }
}

INLINE void finish_silu(const float *gate, const float *up, float *out, int64_t stride, int64_t rows) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < PANEL; c += VW)
            v_store(out + r * stride + c, silu_times(v_load(gate + r * PANEL + c), v_load(up + r * PANEL + c)));
}

/* What is done with the tile of a panel, and of its partner for SILU. */
static void finish_panel(const Matrix *m, int64_t panel, int64_t panels, float *tile, float *partner, float *out,
                         int64_t stride, int64_t rows, int how) {
    int64_t column = panel * PANEL, columns = m->outputs - column < PANEL ? m->outputs - column : PANEL;
    const float *bias = m->bias ? m->bias + column : 0;
    if (how != SILU) {
        finish(tile, bias, out + column, stride, rows, columns, how == ADD);
        return;
    }
    if (bias) {
        finish(tile, bias, tile, PANEL, rows, PANEL, 0);
        finish(partner, bias + panels * PANEL, partner, PANEL, rows, PANEL, 0);
    }
    finish_silu(tile, partner, out + column, stride, rows);
}

/* Rows first..end-1 by a panel; SILU: and by its partner, the panel of the same outputs in the second half. */
static void run_panel(const Matrix *m, const Operand *x, int64_t first, int64_t end, int64_t panel, int64_t panels,
                      float *out, int64_t stride, int how, int vnni, const char *next) {
    float tile[2][TILE_ROWS * PANEL] __attribute__((aligned(64)));
    float room[2][WIDE_INPUTS * PANEL] __attribute__((aligned(64)));
    const float *wide[2] = {0, 0};
    int64_t tiles = (end - first + TILE_ROWS - 1) / TILE_ROWS, size = (end - first + tiles - 1) / tiles;
    int64_t column = panel * PANEL, columns = m->outputs - column < PANEL ? m->outputs - column : PANEL;
    for (int i = 0; i < (how == SILU ? 2 : 1) && m->kind == HALF && tiles >= WIDE_TILES && m->inputs <= WIDE_INPUTS; i++) {
        widen_panel(m, panel + i * panels, room[i]);
        wide[i] = room[i];
    }
    const char *partner = how == SILU ? panel_of(m, panel + panels) : next;
    for (int64_t r = first; r < end; r += size) {
        int64_t rows = end - r < size ? end - r : size;
        float *to = out + r * stride + column;
        for (int64_t i = 0; i < rows; i++)
            for (int64_t c = 0; c < columns; c += LINE / sizeof(float)) __builtin_prefetch(to + i * stride + c, 1, 3);
        multiply(m, panel, x, r, tile[0], rows, wide[0] ? next : partner, wide[0], vnni);
        if (how == SILU)
            multiply(m, panel + panels, x, r, tile[1], rows, wide[1] ? next + panels * panel_bytes(m) : next, wide[1], vnni);
        finish_panel(m, panel, panels, tile[0], tile[1], out + r * stride, stride, rows, how);
    }
}

/* The first `rows` rows by STREAMS panels from `panel` on, and by their partners. */
static void run_streams(const Matrix *m, const Operand *x, int64_t rows, int64_t panel, int64_t panels, float *out,
                        int64_t stride, int how, int vnni, const char *next) {
    float tiles[2][STREAMS][TILE_ROWS * PANEL] __attribute__((aligned(64)));
    multiply_streams(m, panel, x, tiles[0], rows, how == SILU ? panel_of(m, panel + panels) : next, vnni);
    if (how == SILU) multiply_streams(m, panel + panels, x, tiles[1], rows, next, vnni);
    for (int s = 0; s < STREAMS; s++)
        finish_panel(m, panel + s, panels, tiles[0][s], tiles[1][s], out, stride, rows, how);
}

/* Whether rows are so few, and panels so many, that STREAMS of them are read together. */
static int in_streams(int64_t rows, int64_t panels, int64_t threads) {
    return rows > 0 && rows <= TILE_ROWS / STREAMS && panels / STREAMS >= threads * STREAM_PIECES;
}

void NAME(share_product)(const Matrix *m, const Operand *x, int64_t rows, float *out, int64_t stride, int how,
                         Worker *worker) {
    int64_t panels = (m->outputs + PANEL - 1) / PANEL / (how == SILU ? 2 : 1), blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t pieces = worker->threads * MOST_PIECES, step = blocks * panels <= pieces ? worker->threads : 1;
    int vnni = jitney_vnni();
    if (in_streams(rows, panels, worker->threads)) {
        int64_t groups = (panels + STREAMS - 1) / STREAMS;
        SHARE_FOR(worker, group, groups, groups) {
            int64_t first = group * STREAMS, after = group + worker->threads < groups ? first + worker->threads * STREAMS : first;
            if (first + STREAMS <= panels) run_streams(m, x, rows, first, panels, out, stride, how, vnni, panel_of(m, after));
            else for (int64_t panel = first; panel < panels; panel++)
                run_panel(m, x, 0, rows, panel, panels, out, stride, how, vnni, panel_of(m, panel));
        }
        return;
    }
    SHARE_FOR(worker, item, blocks * panels, pieces) {
        int64_t first = item / panels * BLOCK_ROWS, end = first + BLOCK_ROWS < rows ? first + BLOCK_ROWS : rows;
        int64_t panel = item % panels, after = panel + step < panels ? panel + step : panel;
        run_panel(m, x, first, end, panel, panels, out, stride, how, vnni, panel_of(m, after));
    }
}

Operand NAME(share_operand)(const Matrix *m, const float *x, int64_t stride, int64_t rows, int16_t *quantised,
                            float *scale, Own *own, Worker *worker) {
    Operand operand = {x, 0, 0, stride};
    int64_t padded = 2 * pairs_of(m->inputs), groups = groups_of(m->inputs);
    if (m->kind == HALF) return operand;
    operand.stride = padded;
    if (rows <= FEW_ROWS && rows * padded <= OWN_NUMBERS) {
        quantised = own->quantised;
        scale = own->scale;
        for (int64_t r = 0; r < rows; r++)
            quantise_row(x + r * stride, m->inputs, m->kind, quantised + r * padded, scale + r * groups);
    } else {
        SHARE_ROWS(worker, r, rows)
            quantise_row(x + r * stride, m->inputs, m->kind, quantised + r * padded, scale + r * groups);
    }
    operand.quantised = quantised;
    operand.scale = scale;
    return operand;
}

/* x [rows, inputs], out [rows, outputs]; strides are floats between rows. `add`: to what is in out. Whole numbers want
 * room: `quantised` for the inputs of every row, made even, `scale` for a float for each GROUP of them. */
void NAME(linear)(const Matrix *m, const float *x, int64_t x_stride, float *out, int64_t out_stride, int64_t rows,
                  int add, int16_t *quantised, float *scale, int threads) {
    Phase phases[2] = {{0}, {0}};
    TOGETHER(threads) {
        Own own;
        Worker worker = enter(phases);
        Operand from = NAME(share_operand)(m, x, x_stride, rows, quantised, scale, &own, &worker);
        NAME(share_product)(m, &from, rows, out, out_stride, add ? ADD : PUT, &worker);
    }
}

/* Outputs of a panel. */
int64_t NAME(linear_panel)(void) { return PANEL; }
