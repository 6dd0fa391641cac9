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

/* Rows of x [rows, inputs] as the matrix wants them. Whole numbers go to `quantised` [rows, inputs made even] and `scale`
 * [rows, groups], or to the thread's own. */
Operand NAME(share_operand)(const Matrix *m, const float *x, int64_t stride, int64_t rows, int16_t *quantised,
                            float *scale, Own *own, Worker *worker);

void NAME(share_rms_norm)(const float *x, int64_t x_stride, const float *weight, float epsilon, float *out,
                          int64_t out_stride, int64_t rows, int64_t width, Worker *worker);

/* The attention of one layer. */
void NAME(share_attend)(const Job *job, Worker *worker);

#endif
