/* From the logits of a step to its tokens and log-probabilities, by the rules of sampling.py.
 *
 * A row is computed by one thread in an order that its length alone fixes: likelihoods are summed by LANES within each
 * CHUNK of the vocabulary, chunks one after the other in double precision; products are not fused. So a row's bits
 * depend neither on other rows, nor on threads, nor on the instruction set.
 *
 * What filters leave is always the first tokens of a ranking: larger logits first, equal ones by id. The last token of
 * them is found by narrowing a range of logits until BAND tokens are in it; only those are sorted. Chunks whose largest
 * logit is below the range are passed over, which for most rows of a real model are nearly all.
 */
#include <float.h>
#include <stdint.h>

#include "parallel.h"
#include "row.h"
#include "vec.h"

#define LANES 16
#define CHUNK 128
#define BAND 64

typedef struct {
    const float *logits; /* [rows, vocabulary], `stride` floats between rows */
    int64_t stride, rows, vocabulary;
    const float *temperature, *top_p, *min_p; /* [rows]; of temperature 0: the largest */
    const int32_t *top_k;                     /* 0: all */
    const uint64_t *seed;
    const int32_t *choice, *position;
    const int32_t *wanted; /* log-probabilities of so many of the most likely tokens; -1: none at all */
    int32_t *tokens;       /* [rows] */
    float *own;            /* [rows]: of the token; this and what follows is written for rows that want it */
    int32_t *ids;          /* [rows, most] */
    float *likely;
    int64_t most;
    char *scratch; /* sample_scratch bytes for each thread */
    int64_t threads;
} Sampled;

/* A row, and what is known about it: [chunks * CHUNK] likelihoods; of each chunk the largest logit, and the sum of the
 * likelihoods that are kept. Behind the vocabulary there are logits of -inf up to the end of the last chunk. */
typedef struct {
    const float *logits;
    int64_t vocabulary, chunks;
    float *likelihood, *tops, *sums;
    uint64_t *keys;
    float top;
    int odd; /* a logit is NaN, or none is finite, or one is +inf */
    float tail[CHUNK];
} Row;

/* Kept: tokens with larger logits than `at`, and those with just that whose ids are below `before`; of these, the ones
 * with at least this likelihood. */
typedef struct {
    float at;
    int32_t before;
    float min_p;
} Cut;

typedef struct {
    int64_t count;
    double mass;
} Amount;

INLINE const float *chunk_of(const Row *row, int64_t c) {
    return (c + 1) * CHUNK <= row->vocabulary ? row->logits + c * CHUNK : row->tail;
}

/* Sums of LANES lanes, by halves: the same order whatever the width of a vector. */
INLINE float lanes_sum(vf *x) {
    for (int width = LANES / VW / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return v_sum(x[0]);
}

/* e^y for y <= 0, within 2 units in the last place; 0 below -87. e^y = 2^n e^f with |f| <= ln 2 / 2; n's rounding
 * constant leaves it in the low bits of the sum, ln 2 is in two parts whose first times n is exact, e^f by Taylor. */
INLINE vf likelihood_of(vf y) {
    const vf magic = v_set(12582912.0f);
    vf shifted = y * v_set(1.44269504f) + magic;
    vf n = shifted - magic;
    vf f = y - n * v_set(0.693359375f) - n * v_set(-2.12194440e-4f);
    vf p = v_set(1.0f / 5040);
    p = p * f + v_set(1.0f / 720);
    p = p * f + v_set(1.0f / 120);
    p = p * f + v_set(1.0f / 24);
    p = p * f + v_set(1.0f / 6);
    p = p * f + v_set(0.5f);
    p = p * f + v_set(1.0f);
    p = p * f + v_set(1.0f);
    vi scaled = (vi)((vu)p + ((vu)shifted << 23));
    return (vf)(scaled & ~(y < v_set(-87.0f)));
}

/* Looks at all logits: the largest of each chunk and of the row. */
static void survey(Row *row, const float *logits, int64_t vocabulary) {
    row->logits = logits;
    row->vocabulary = vocabulary;
    row->chunks = (vocabulary + CHUNK - 1) / CHUNK;
    int64_t whole = vocabulary - vocabulary % CHUNK;
    for (int64_t i = 0; i < CHUNK; i++) row->tail[i] = whole + i < vocabulary ? logits[whole + i] : -INFINITY;
    vi odd = {0};
    row->top = -INFINITY;
    for (int64_t c = 0; c < row->chunks; c++) {
        const float *x = chunk_of(row, c);
        vf top = v_set(-INFINITY);
        for (int i = 0; i < CHUNK; i += VW) {
            vf value = v_load(x + i);
            top = v_max(value, top);
            odd |= value != value;
        }
        row->tops[c] = v_top(top);
        if (row->tops[c] > row->top) row->top = row->tops[c];
    }
    row->odd = !(row->top > -INFINITY && row->top < INFINITY);
    for (int lane = 0; lane < VW; lane++) row->odd |= odd[lane] != 0;
}

static double total_of(const Row *row) {
    double total = 0;
    for (int64_t c = 0; c < row->chunks; c++) total += row->sums[c];
    return total;
}

/* Likelihoods e^((logit - largest) / temperature) and their sums, but of chunks without a logit of at least `from`. */
static void weigh(Row *row, float temperature, float from) {
    const vf top = v_set(row->top), scale = v_set(temperature);
    for (int64_t c = 0; c < row->chunks; c++) {
        if (row->tops[c] < from) {
            row->sums[c] = 0;
            continue;
        }
        const float *x = chunk_of(row, c);
        float *to = row->likelihood + c * CHUNK;
        vf sums[LANES / VW] = {{0}};
        for (int i = 0; i < CHUNK; i += LANES)
            for (int j = 0; j < LANES / VW; j++) {
                vf e = likelihood_of((v_load(x + i + j * VW) - top) / scale);
                v_store(to + i + j * VW, e);
                sums[j] += e;
            }
        row->sums[c] = lanes_sum(sums);
    }
}

INLINE vf kept(vf logits, vf likelihood, vi ids, Cut cut) {
    vi in = (logits > v_set(cut.at)) | ((logits == v_set(cut.at)) & (ids < v_set_int(cut.before)));
    return (vf)((vi)likelihood & in & (likelihood >= v_set(cut.min_p)));
}

/* The sums of what a cut keeps. */
static void sum_kept(Row *row, Cut cut) {
    for (int64_t c = 0; c < row->chunks; c++) {
        if (row->tops[c] < cut.at) {
            row->sums[c] = 0;
            continue;
        }
        const float *x = chunk_of(row, c), *e = row->likelihood + c * CHUNK;
        vi ids = v_lanes() + v_set_int((int32_t)(c * CHUNK));
        vf sums[LANES / VW] = {{0}};
        for (int i = 0; i < CHUNK; i += LANES)
            for (int j = 0; j < LANES / VW; j++, ids += v_set_int(VW))
                sums[j] += kept(v_load(x + i + j * VW), v_load(e + i + j * VW), ids, cut);
        row->sums[c] = lanes_sum(sums);
    }
}

enum { COUNT, MASS };

/* How many tokens have logits of at least `at`; by mass also how likely they are together. */
static Amount reach(const Row *row, int by, float at) {
    Amount found = {0, 0};
    vi counts = {0};
    for (int64_t c = 0; c < row->chunks; c++) {
        if (row->tops[c] < at) continue;
        const float *x = chunk_of(row, c), *e = row->likelihood + c * CHUNK;
        vf sums[LANES / VW] = {{0}};
        for (int i = 0; i < CHUNK; i += VW) counts -= v_load(x + i) >= v_set(at);
        for (int i = 0; by == MASS && i < CHUNK; i += LANES)
            for (int j = 0; j < LANES / VW; j++)
                sums[j] += (vf)((vi)v_load(e + i + j * VW) & (v_load(x + i + j * VW) >= v_set(at)));
        if (by == MASS) found.mass += lanes_sum(sums);
    }
    for (int lane = 0; lane < VW; lane++) found.count += counts[lane];
    return found;
}

/* Rises with the rank; its low half is the id. */
INLINE uint64_t key_of(float logit, int64_t id) {
    uint32_t bits;
    logit += 0.0f; /* -0 ranks as 0 does */
    memcpy(&bits, &logit, 4);
    uint32_t rising = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)~rising << 32 | (uint64_t)id;
}

/* Puts the tokens with low <= logit < high into `keys`, ranked; how many there are. */
static int64_t collect(Row *row, float low, float high) {
    int64_t count = 0;
    for (int64_t c = 0; c < row->chunks; c++) {
        if (row->tops[c] < low) continue;
        const float *x = chunk_of(row, c);
        vi any = {0};
        for (int i = 0; i < CHUNK; i += VW) any |= (v_load(x + i) >= v_set(low)) & (v_load(x + i) < v_set(high));
        int there = 0;
        for (int lane = 0; lane < VW; lane++) there |= any[lane];
        for (int i = 0; there && i < CHUNK; i++) {
            if (!(x[i] >= low && x[i] < high)) continue;
            uint64_t key = key_of(x[i], c * CHUNK + i);
            int64_t at = count++;
            for (; at > 0 && row->keys[at - 1] > key; at--) row->keys[at] = row->keys[at - 1];
            row->keys[at] = key;
        }
    }
    return count;
}

INLINE double amount(Amount of, int by) { return by == COUNT ? (double)of.count : of.mass; }

/* Where the ranking has reached a number of tokens, or a mass, which it does from `least` up; `step` is how far below
 * the largest to look first. */
static Cut cut_at(Row *row, int by, double target, float step, float least) {
    float low = row->top, high = INFINITY;
    Amount until = reach(row, by, low), above = {0, 0}; /* the tokens from `low` up, and from `high` up */
    while (amount(until, by) < target && low > least) {
        high = low, above = until;
        low = row->top - step;
        if (!(low > -FLT_MAX)) low = high > -FLT_MAX ? -FLT_MAX : -INFINITY;
        if (low < least) low = least;
        step *= 2;
        until = reach(row, by, low);
    }
    while (high < INFINITY && until.count - above.count > BAND) {
        float middle = 0.5f * low + 0.5f * high;
        if (!(low < middle && middle < high)) middle = nextafterf(low, high);
        if (middle == high) break; /* so many equal ones */
        Amount found = reach(row, by, middle);
        if (amount(found, by) >= target) low = middle, until = found;
        else high = middle, above = found;
    }
    int64_t count = collect(row, low, high), last = 0;
    if (count == 0) return (Cut){-INFINITY, INT32_MAX, 0}; /* sums rounded to below the target: everything */
    for (double reached = amount(above, by); last < count - 1; last++) {
        reached += by == COUNT ? 1 : row->likelihood[(uint32_t)row->keys[last]];
        if (reached >= target) break;
    }
    int32_t id = (int32_t)(uint32_t)row->keys[last];
    return (Cut){id < row->vocabulary ? row->logits[id] : -INFINITY, id + 1, 0};
}

/* The token at which the sum of what is kept passes `number` of its whole; if rounding meets the end, the last one. */
static int32_t pick(const Row *row, Cut cut, double number) {
    double target = number * total_of(row), sum = 0, before = 0;
    int64_t chunk = 0;
    for (int64_t c = 0; c < row->chunks && sum <= target; c++) {
        if (!(row->sums[c] > 0)) continue;
        chunk = c, before = sum;
        sum += row->sums[c];
    }
    const float *x = chunk_of(row, chunk), *e = row->likelihood + chunk * CHUNK;
    int32_t found = 0;
    sum = before;
    for (int i = 0; i < CHUNK && sum <= target; i++) {
        int32_t id = (int32_t)(chunk * CHUNK + i);
        float likelihood = kept(v_set(x[i]), v_set(e[i]), v_set_int(id), cut)[0];
        if (!(likelihood > 0)) continue;
        found = id;
        sum += likelihood;
    }
    return found;
}

/* Philox 4x32-10 as in philox.py, draw 0: 53 random bits, in [0, 1). */
static double number_of(uint64_t seed, int32_t choice, int32_t position) {
    uint32_t c0 = 0, c1 = (uint32_t)position, c2 = (uint32_t)choice, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        uint64_t first = (uint64_t)0xD2511F53u * c0, second = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(second >> 32) ^ c1 ^ k0, c1 = (uint32_t)second;
        c2 = (uint32_t)(first >> 32) ^ c3 ^ k1, c3 = (uint32_t)first;
    }
    return (double)((uint64_t)(c0 >> 5) << 26 | c1 >> 6) * 0x1p-53;
}

/* The first NaN, or else the first +inf, or else 0: of a row that has no likelihoods. */
static int32_t first_odd(const float *logits, int64_t vocabulary) {
    int64_t infinite = -1;
    for (int64_t i = 0; i < vocabulary; i++) {
        if (logits[i] != logits[i]) return (int32_t)i;
        if (infinite < 0 && logits[i] == INFINITY) infinite = i;
    }
    return infinite < 0 ? 0 : (int32_t)infinite;
}

static int32_t draw(const Sampled *step, int64_t r, Row *row) {
    float temperature = step->temperature[r], top_p = step->top_p[r];
    if (row->odd) return first_odd(row->logits, row->vocabulary);
    Cut cut = {-INFINITY, INT32_MAX, 0};
    int few = step->top_k[r] > 0 && step->top_k[r] < row->vocabulary;
    if (few) cut = cut_at(row, COUNT, step->top_k[r], temperature, -INFINITY);
    weigh(row, temperature, cut.at);
    if (few) sum_kept(row, cut);
    if (top_p < 1) {
        Cut nucleus = cut_at(row, MASS, (double)top_p * total_of(row), temperature, cut.at);
        if (nucleus.at > cut.at || (nucleus.at == cut.at && nucleus.before < cut.before)) cut = nucleus;
    }
    cut.min_p = step->min_p[r];
    if (top_p < 1 || cut.min_p > 0) sum_kept(row, cut);
    return pick(row, cut, number_of(step->seed[r], step->choice[r], step->position[r]));
}

/* A row without NaN and +inf that ranks alike, but that NaN is at the end; where likelihoods would be. */
static void make_even(Row *row) {
    float *even = row->likelihood;
    for (int64_t i = 0; i < row->vocabulary; i++) {
        float value = row->logits[i];
        even[i] = value != value ? -INFINITY : value < FLT_MAX ? value : FLT_MAX;
    }
    for (int64_t i = row->vocabulary; i < row->chunks * CHUNK; i++) even[i] = -INFINITY;
    survey(row, even, row->vocabulary);
}

/* Of an odd row all log-probabilities are NaN. */
static void tell(const Sampled *step, int64_t r, Row *row) {
    const float *logits = row->logits;
    double total = NAN;
    if (row->odd) {
        make_even(row);
    } else {
        weigh(row, 1.0f, -INFINITY);
        total = row->top + log(total_of(row));
    }
    step->own[r] = (float)(logits[step->tokens[r]] - total);
    int64_t count = step->wanted[r] < step->most ? step->wanted[r] : step->most;
    if (count <= 0) return;
    collect(row, cut_at(row, COUNT, (double)count, 1.0f, -INFINITY).at, INFINITY);
    for (int64_t i = 0; i < count; i++) {
        int32_t id = (int32_t)(uint32_t)row->keys[i];
        step->ids[r * step->most + i] = id;
        step->likely[r * step->most + i] = (float)(logits[id] - total);
    }
}

INLINE int64_t padded(int64_t vocabulary) { return (vocabulary + CHUNK - 1) / CHUNK * CHUNK; }

/* Bytes that a thread works in: keys and likelihoods of all tokens, and two numbers for each chunk. */
int64_t NAME(sample_scratch)(int64_t vocabulary) {
    return padded(vocabulary) * 12 + (padded(vocabulary) / CHUNK * 8 + 63) / 64 * 64;
}

void NAME(sample)(const Sampled *step) {
    Phase only = {0};
    TOGETHER((int)step->threads) {
        Worker worker = enter(&only);
        int64_t width = padded(step->vocabulary);
        char *scratch = step->scratch + worker.thread * NAME(sample_scratch)(step->vocabulary);
        Row row = {.keys = (uint64_t *)scratch, .likelihood = (float *)(scratch + 8 * width)};
        row.tops = row.likelihood + width;
        row.sums = row.tops + width / CHUNK;
        SHARE_FOR(&worker, r, step->rows, step->rows) {
            const float *logits = step->logits + r * step->stride;
            int drawn = step->temperature[r] > 0, told = step->wanted[r] >= 0;
            if (!drawn) step->tokens[r] = (int32_t)argmax_row(logits, step->vocabulary);
            if (!drawn && !told) continue;
            survey(&row, logits, step->vocabulary);
            if (drawn) step->tokens[r] = draw(step, r, &row);
            if (told) tell(step, r, &row);
        }
    }
}
