/* All layers of a Llama network over the tokens of a step: one region of threads from the first norm to the last sum. */
#include <time.h>

#include "network.h"
#include "parallel.h"
#include "pool.h"
#include "row.h"

#define LOOPS 16 /* of a layer, at most: 14 with whole numbers */

/* Norms are [hidden]; q_norm and k_norm [head_size], or null. */
typedef struct {
    const float *attention_norm, *q_norm, *k_norm, *ffn_norm;
    Matrix qkv, output, gate_up, down;
} Layer;

typedef struct {
    const Layer *layers;
    int64_t count, hidden, heads, kv_heads, head_size, ffn;
    const float *cosines, *sines; /* [positions, head_size / 2] */
    float epsilon;
} Network;

typedef struct {
    float *x; /* [tokens, hidden]: embeddings; afterwards the first `samples` rows are those of `sampled` */
    float *normed, *wide, *attended, *activated;
    int16_t *quantised; /* for whole numbers: [tokens, the most inputs of a product], */
    float *scale;       /* and a scale for each GROUP */
    const int32_t *positions;
    const int64_t *slots; /* of the pool; -1: not written */
    int64_t tokens;
    const int64_t *sampled; /* tokens, rising */
    int64_t samples;
    const Job *attention; /* at the first layer's keys */
    int64_t layer_bytes;  /* of the pool */
    Phase *phases;        /* LOOPS for each layer, at a cache line's start */
    int64_t threads;
    int64_t *times; /* null, or nanoseconds of each part, to be added to */
} Step;

enum { PRODUCTS, ATTENTION, ROWS };

/* Adds what has passed since the last call to a part. */
static void tick(const Step *step, Worker *worker, int part) {
    if (!step->times || worker->thread) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    if (worker->since) step->times[part] += ns - worker->since;
    worker->since = ns;
}

static void product(const Step *step, const Matrix *m, const float *x, int64_t rows, float *out, int64_t stride, int how,
                    Worker *worker) {
    Own own;
    Operand from = NAME(share_operand)(m, x, m->inputs, rows, step->quantised, step->scale, &own, worker);
    NAME(share_product)(m, &from, rows, out, stride, how, worker);
    tick(step, worker, PRODUCTS);
}

static void norm(const Network *net, const Step *step, const float *weight, int64_t rows, Worker *worker) {
    NAME(share_rms_norm)(step->x, net->hidden, weight, net->epsilon, step->normed, net->hidden, rows, net->hidden, worker);
    tick(step, worker, ROWS);
}

/* Norms of heads, rotary embedding, and keys and values into the pool. */
static void place(const Network *net, const Layer *layer, const Step *step, char *pool,
                  Worker *worker) {
    const Job *job = step->attention;
    int64_t size = net->head_size, row = (net->heads + 2 * net->kv_heads) * size;
    SHARE_ROWS(worker, t, step->tokens) {
        float *q = step->wide + t * row, *k = q + net->heads * size;
        const float *cosine = net->cosines + step->positions[t] * (size / 2);
        const float *sine = net->sines + step->positions[t] * (size / 2);
        for (int64_t h = 0; h < net->heads + net->kv_heads; h++) {
            const float *norm = h < net->heads ? layer->q_norm : layer->k_norm;
            if (norm) norm_row(q + h * size, norm, net->epsilon, q + h * size, size);
            rotate_head(q + h * size, cosine, sine, size / 2);
        }
        store_kv(pool, job->half, job->block_stride, job->block_tokens, net->kv_heads, size, step->slots[t], k,
                 k + net->kv_heads * size);
    }
    tick(step, worker, ROWS);
}

/* The rows that sample, moved to the front of x and of attended. */
static void gather(const Network *net, const Step *step, Worker *worker) {
    int64_t width = net->heads * net->head_size;
    SHARE_FOR(worker, i, step->samples, 1) {
        memmove(step->x + i * net->hidden, step->x + step->sampled[i] * net->hidden, net->hidden * sizeof(float));
        memmove(step->attended + i * width, step->attended + step->sampled[i] * width, width * sizeof(float));
    }
}

static void feed_forward(const Network *net, const Layer *layer, const Step *step, int64_t rows, Worker *worker) {
    norm(net, step, layer->ffn_norm, rows, worker);
    if (net->ffn % PANEL == 0) {
        product(step, &layer->gate_up, step->normed, rows, step->activated, net->ffn, SILU, worker);
    } else {
        product(step, &layer->gate_up, step->normed, rows, step->wide, 2 * net->ffn, PUT, worker);
        SHARE_ROWS(worker, r, rows)
            silu_row(step->wide + 2 * r * net->ffn, step->wide + (2 * r + 1) * net->ffn, step->activated + r * net->ffn,
                     net->ffn);
        tick(step, worker, ROWS);
    }
    product(step, &layer->down, step->activated, rows, step->x, net->hidden, ADD, worker);
}

/* A step whose rows do not sample ends with the keys and values of the last layer. */
static void run_layer(const Network *net, int64_t index, const Step *step, Worker *worker) {
    const Layer *layer = net->layers + index;
    int64_t rows = step->tokens, last = index + 1 == net->count;
    Job job = *step->attention;
    job.pool += index * step->layer_bytes;
    job.q = step->wide;
    job.out = step->attended;
    job.q_stride = (net->heads + 2 * net->kv_heads) * net->head_size;
    job.out_stride = net->heads * net->head_size;
    norm(net, step, layer->attention_norm, rows, worker);
    product(step, &layer->qkv, step->normed, rows, step->wide, job.q_stride, PUT, worker);
    place(net, layer, step, (char *)job.pool, worker);
    if (last && !step->samples) return;
    NAME(share_attend)(&job, worker);
    tick(step, worker, ATTENTION);
    if (last && step->samples < rows) {
        gather(net, step, worker);
        rows = step->samples;
    }
    product(step, &layer->output, step->attended, rows, step->x, net->hidden, ADD, worker);
    feed_forward(net, layer, step, rows, worker);
}

void NAME(layers)(const Network *net, const Step *step) {
    memset(step->phases, 0, net->count * LOOPS * sizeof(Phase));
    TOGETHER(step->threads) {
        Worker worker = enter(step->phases);
        tick(step, &worker, ROWS);
        for (int64_t index = 0; index < net->count; index++) {
            worker.phase = step->phases + index * LOOPS;
            run_layer(net, index, step, &worker);
        }
    }
}

/* Bytes of the phases of a layer. */
int64_t NAME(layer_phases)(void) { return LOOPS * sizeof(Phase); }
