/* What the parts of a step tell each other. The share_ functions are called by every thread of a region (parallel.h), with
 * the same arguments, and return when all of them have done their share. */
#ifndef JITNEY_NETWORK_H
#define JITNEY_NETWORK_H

#include <stdint.h>

#include "attention.h"
#include "parallel.h"
#include "product.h"

enum { PUT, ADD, SILU }; /* a product is written; added to what is there; or silu(first half) * second half is written */

int jitney_vnni(void);

/* out [rows, outputs], for SILU half of them, which must be whole panels. */
void NAME(share_product)(const Matrix *m, const Operand *x, int64_t rows, float *out, int64_t stride, int how,
                         Worker *worker);

/* Rows as int16 [rows, inputs made even] with a scale each. */
void NAME(share_quantise)(const float *x, int64_t stride, int64_t rows, int64_t inputs, int16_t *to, float *scale,
                          Worker *worker);

void NAME(share_rms_norm)(const float *x, int64_t x_stride, const float *weight, float epsilon, float *out,
                          int64_t out_stride, int64_t rows, int64_t width, Worker *worker);

/* The attention of one layer. */
void NAME(share_attend)(const Job *job, Worker *worker);

#endif
