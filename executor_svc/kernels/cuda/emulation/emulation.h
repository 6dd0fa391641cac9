/* CUDA's threads on a CPU: the kernels' own source, compiled by a C++ compiler with this header before it.
 *
 * Every thread is a fiber with a stack of its own; thread blocks run one after another. A fiber runs until it waits for
 * others (a barrier, or something a warp does together), in an order that differs from launch to launch. Shared memory
 * is full of NaN when a thread block begins. What ends a launch with a message: threads that wait for each other, lanes
 * that meet at different instructions, a barrier that some never reach, an access of 16 bytes that is not aligned, an
 * address where nothing is. What it cannot show: weak memory order, copies that go on by themselves, speed.
 */
#pragma once
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <algorithm>
#include <tuple>
#include <utility>
#include <sys/mman.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("emulated_shared"), aligned(16)))

typedef uint32_t u32;
typedef uint16_t u16;
typedef int64_t i64;

#define WARP 32
#define NEVER (-INFINITY)

struct uint3 { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;

namespace emulation {

constexpr int MOST_THREADS = 1024, STACK_BYTES = 64 << 10, EXCHANGE_BYTES = 48;

/* What the lanes of a warp hand each other. Two sets, in turn: a lane may be one exchange ahead of the last reader. */
struct Warp {
    int lanes, arrived;
    unsigned turn;
    const char *what;
    unsigned char given[2][WARP][EXCHANGE_BYTES], taken[2][WARP][EXCHANGE_BYTES];
};

struct Fiber {
    void *stack_pointer;
    uint3 thread;
    Warp *warp;
    int lane, index;
    bool over;
    const unsigned *waits_for; /* null, or a count that changes when it may go on */
    unsigned seen;
};

struct Machine {
    Fiber fibers[MOST_THREADS];
    Warp warps[MOST_THREADS / WARP];
    int order[MOST_THREADS], place[MOST_THREADS];
    int threads, left, at_barrier;
    unsigned barriers, seed;
    Fiber *running;
    void *outside; /* stack pointer of the launch */
    uint3 grid, block, block_index;
    void (*body)(void *);
    void *arguments;
    char *stacks;
    jmp_buf failed;
    char message[256];
};

extern Machine machine;
[[noreturn]] void fail(const char *what);
void wait_for_change(const unsigned *count);
void barrier();
float element_to_float(u16 bits);

/* All lanes of the warp give `mine`; the last to come computes what each of them takes. */
template <class Given, class Taken, class Compute>
inline Taken exchange(const char *what, const Given &mine, Compute compute) {
    static_assert(sizeof(Given) <= EXCHANGE_BYTES && sizeof(Taken) <= EXCHANGE_BYTES, "");
    Fiber &me = *machine.running;
    Warp &warp = *me.warp;
    const unsigned turn = warp.turn, set = turn & 1;
    if (warp.arrived == 0) warp.what = what;
    if (warp.what != what) fail("lanes of a warp meet at different instructions");
    memcpy(warp.given[set][me.lane], &mine, sizeof mine);
    if (++warp.arrived == warp.lanes) {
        compute(warp.given[set], warp.taken[set]);
        warp.arrived = 0;
        warp.turn++;
    } else {
        wait_for_change(&warp.turn);
    }
    Taken result;
    memcpy(&result, warp.taken[set][me.lane], sizeof result);
    return result;
}

struct MmaGiven { float c[4]; u32 a[4], b[2]; };
struct MmaTaken { float c[4]; };
void multiply(unsigned char (*given)[EXCHANGE_BYTES], unsigned char (*taken)[EXCHANGE_BYTES]);

template <class From> inline const void *checked(const From *address) {
    if ((uintptr_t)address % 16) fail("16 bytes at an address that is not aligned");
    return address;
}

} // namespace emulation

#define threadIdx (emulation::machine.running->thread)
#define blockIdx (emulation::machine.block_index)
#define blockDim (emulation::machine.block)
#define gridDim (emulation::machine.grid)

inline void __syncthreads() { emulation::barrier(); }

inline uint4 load16(const void *from) {
    uint4 x;
    memcpy(&x, emulation::checked((const char *)from), sizeof x);
    return x;
}
inline uint4 load16_once(const void *from) { return load16(from); }
inline void store16(void *to, uint4 x) { memcpy((void *)emulation::checked((char *)to), &x, sizeof x); }

inline float shuffle(float x, int lane) {
    struct Given { float x; int lane; };
    return emulation::exchange<Given, float>("shuffle", {x, lane}, [](auto given, auto taken) {
        for (int i = 0; i < WARP; i++) memcpy(taken[i], given[((Given *)given[i])->lane % WARP], sizeof(float));
    });
}
inline float shuffle_xor(float x, int mask) { return shuffle(x, emulation::machine.running->lane ^ mask); }

inline float exp2_fast(float x) { return exp2f(x); }

inline u32 low_halves(u32 a, u32 b) { return (a & 0xffffu) | (b << 16); }
inline u32 high_halves(u32 a, u32 b) { return (a >> 16) | (b & 0xffff0000u); }

#ifdef ELEMENT_BF16
inline u16 to_element(float x) {
    u32 bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
#else
inline u16 to_element(float x) {
    const _Float16 rounded = (_Float16)x;
    u16 bits;
    memcpy(&bits, &rounded, sizeof bits);
    return bits;
}
#endif
inline u32 pack(float first, float second) { return to_element(first) | (u32)to_element(second) << 16; }
inline float first_of(u32 x) { return emulation::element_to_float((u16)x); }
inline float second_of(u32 x) { return emulation::element_to_float((u16)(x >> 16)); }

inline void mma(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const emulation::MmaGiven mine = {{c[0], c[1], c[2], c[3]}, {a0, a1, a2, a3}, {b0, b1}};
    const auto sums = emulation::exchange<emulation::MmaGiven, emulation::MmaTaken>("mma", mine, emulation::multiply);
    memcpy(c, sums.c, sizeof sums.c);
}
