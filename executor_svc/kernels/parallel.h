/* Loops over threads, on the OpenMP runtime that torch has loaded already: both then share one pool of threads. */
#ifndef JITNEY_PARALLEL_H
#define JITNEY_PARALLEL_H

#if defined(_OPENMP)
#include <omp.h>
#define PRAGMA(x) _Pragma(#x)
#define PARALLEL_FOR(threads) PRAGMA(omp parallel for num_threads(threads) if ((threads) > 1) schedule(static))
#define DYNAMIC_FOR(threads) PRAGMA(omp parallel for num_threads(threads) if ((threads) > 1) schedule(dynamic, 1))
#define THREAD() omp_get_thread_num()
#else
#define PARALLEL_FOR(threads) (void)(threads);
#define DYNAMIC_FOR(threads) (void)(threads);
#define THREAD() 0
#endif

#endif
