/* Work shared by the threads of a region, on the OpenMP runtime that torch has loaded already: both then use one pool of
 * threads.
 *
 * Every thread of a region runs the same code and meets the same loops in the same order, each with a Phase of its own.
 * A loop's pieces go to whoever asks first, and a thread leaves the loop when all pieces are done, whoever did them. So
 * nobody waits for a thread that the system has put aside between two pieces, e.g. because something else computes on
 * its processor: it finds the loops finished that it missed, and takes part in the one that is under way.
 */
#ifndef JITNEY_PARALLEL_H
#define JITNEY_PARALLEL_H

#include <stdatomic.h>
#include <stdint.h>

#if defined(_OPENMP)
#include <omp.h>
#define PRAGMA(x) _Pragma(#x)
#define TOGETHER(threads) PRAGMA(omp parallel num_threads(threads) if ((threads) > 1))
#define THREAD() omp_get_thread_num()
#define TEAM() omp_get_num_threads()
#else
#define TOGETHER(threads) (void)(threads);
#define THREAD() 0
#define TEAM() 1
#endif

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() (void)0
#endif

#include <sched.h>

#define SPINS 4096          /* before the processor is left to others */
#define PIECES_A_THREAD 2

typedef struct {
    _Alignas(64) _Atomic int64_t next, done;
} Phase;

/* A thread of a region, and the loop that it meets next. */
typedef struct {
    Phase *phase;
    int64_t thread, threads;
    int64_t since; /* for whoever takes its time */
} Worker;

typedef struct {
    Phase *phase;
    int64_t count, pieces, from, to;
} Share;

/* `phases`: one for each loop of the region, all zero. */
static inline Worker enter(Phase *phases) {
    Worker worker = {phases, THREAD(), TEAM(), 0};
    return worker;
}

static inline Share begin_share(Worker *worker, int64_t count, int64_t pieces) {
    Share share = {worker->phase++, count, pieces < count ? pieces : count, 0, -1};
    return share;
}

/* The next piece, from..to-1; or 0, when all pieces of all threads are done. */
static inline int next_piece(Share *share) {
    Phase *phase = share->phase;
    if (share->to >= 0) atomic_fetch_add_explicit(&phase->done, 1, memory_order_release);
    int64_t piece = atomic_fetch_add_explicit(&phase->next, 1, memory_order_relaxed);
    if (piece < share->pieces) {
        share->from = piece * share->count / share->pieces;
        share->to = (piece + 1) * share->count / share->pieces;
        return 1;
    }
    for (int spins = 0; atomic_load_explicit(&phase->done, memory_order_acquire) < share->pieces; spins++) {
        if (spins < SPINS) RELAX();
        else sched_yield();
    }
    return 0;
}

/* A loop of i from 0 to count-1 in so many pieces. It must run to its end. */
#define SHARE_FOR(worker, i, count, pieces)                                                 \
    for (Share i##_share = begin_share(worker, count, pieces); next_piece(&i##_share);)     \
        for (int64_t i = i##_share.from; i < i##_share.to; i++)

/* The same over rows that take equally long. */
#define SHARE_ROWS(worker, r, rows) SHARE_FOR(worker, r, rows, (worker)->threads * PIECES_A_THREAD)

/* A region that is one loop over rows. */
#define ROWS_TOGETHER(threads, r, rows) \
    Phase only = {0};                   \
    TOGETHER(threads)                   \
    for (Worker worker = enter(&only); worker.phase == &only;) SHARE_ROWS(&worker, r, rows)

#endif
