/* The machine of emulation.h: fibers, their scheduler, the tensor core, and the entry that a launcher calls. */
#pragma once

extern char __start_emulated_shared[] __attribute__((weak)), __stop_emulated_shared[] __attribute__((weak));

namespace emulation {

Machine machine;

void fail(const char *what) {
    const uint3 t = machine.running ? machine.running->thread : uint3{}, b = machine.block_index;
    snprintf(machine.message, sizeof machine.message, "%s: thread %u of thread block (%u, %u, %u)", what, t.x, b.x, b.y,
             b.z);
    longjmp(machine.failed, 1);
}

/* switch_stacks(save, to): keeps the callee-saved registers on the stack, puts the stack pointer away, takes another. */
#if defined(__x86_64__)
asm(R"(
.text
.type emulation_switch, @function
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulation_switch, .-emulation_switch
)");
constexpr int SAVED_WORDS = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.type emulation_switch, %function
emulation_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size emulation_switch, .-emulation_switch
)");
#else
#error "the emulation switches stacks on x86-64 and arm64 only"
#endif
extern "C" void emulation_switch(void **save, void *to);

static bool ready(const Fiber &f) { return !f.over && (f.waits_for == nullptr || *f.waits_for != f.seen); }

/* Goes on with the next thread that can; back to the launch when none is left. */
static void run_next() {
    Fiber *me = machine.running;
    for (int i = 1; i <= machine.threads; i++) {
        Fiber &next = machine.fibers[machine.order[(machine.place[me->index] + i) % machine.threads]];
        if (!ready(next)) continue;
        next.waits_for = nullptr;
        if (&next == me) return;
        machine.running = &next;
        emulation_switch(&me->stack_pointer, next.stack_pointer);
        return;
    }
    if (machine.left == 0) emulation_switch(&me->stack_pointer, machine.outside);
    fail(machine.at_barrier > 0 ? "a barrier that not all threads reach" : "lanes wait for others that never come");
}

void wait_for_change(const unsigned *count) {
    machine.running->waits_for = count;
    machine.running->seen = *count;
    run_next();
}

void barrier() {
    if (++machine.at_barrier == machine.threads) {
        machine.at_barrier = 0;
        machine.barriers++;
    } else {
        wait_for_change(&machine.barriers);
    }
}

static void fiber_main() {
    machine.body(machine.arguments);
    machine.running->over = true;
    machine.left--;
    run_next();
    abort();
}

static unsigned random_below(unsigned limit) {
    machine.seed = machine.seed * 1664525u + 1013904223u;
    return (unsigned)((uint64_t)(machine.seed >> 8) * limit >> 24);
}

/* Warps in any order, the lanes of each from any one on. */
static void shuffle_order() {
    const int warps = (machine.threads + WARP - 1) / WARP;
    int turn[MOST_THREADS / WARP], at = 0;
    for (int w = 0; w < warps; w++) turn[w] = w;
    for (int w = warps - 1; w > 0; w--) std::swap(turn[w], turn[random_below(w + 1)]);
    for (int w = 0; w < warps; w++) {
        const int lanes = machine.warps[turn[w]].lanes, first = random_below(lanes);
        for (int i = 0; i < lanes; i++) machine.order[at++] = turn[w] * WARP + (first + i) % lanes;
    }
    for (int i = 0; i < machine.threads; i++) machine.place[machine.order[i]] = i;
}

static void begin_block() {
    memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared);
    machine.left = machine.threads;
    machine.at_barrier = 0;
    for (int i = 0; i < machine.threads; i++) {
        Warp &warp = machine.warps[i / WARP];
        if (i % WARP == 0) {
            memset(&warp, 0xff, sizeof warp);
            warp.lanes = min(WARP, machine.threads - i);
            warp.arrived = 0;
            warp.turn = 0;
        }
        void **top = (void **)(machine.stacks + (size_t)(i + 1) * STACK_BYTES);
#if defined(__x86_64__)
        *--top = nullptr; /* where fiber_main would return to: it never does */
        *--top = (void *)fiber_main;
        top -= SAVED_WORDS;
        memset(top, 0, SAVED_WORDS * sizeof *top);
#else
        top -= 20;
        memset(top, 0, 20 * sizeof *top);
        top[11] = (void *)fiber_main;
#endif
        const unsigned x = i % machine.block.x, rest = i / machine.block.x;
        machine.fibers[i] = {top, {x, rest % machine.block.y, rest / machine.block.y}, &warp, i % WARP, i, false, nullptr, 0};
    }
    shuffle_order();
    machine.running = &machine.fibers[machine.order[0]];
    emulation_switch(&machine.outside, machine.running->stack_pointer);
}

static sigjmp_buf fault;
static void on_fault(int) { siglongjmp(fault, 1); }

/* Runs a grid. Null, or what went wrong. One launch at a time. */
static const char *run(void (*body)(void *), void *arguments, const uint3 grid, const uint3 block, unsigned seed) {
    const size_t alternate_bytes = 64 << 10;
    static char *alternate = (char *)malloc(alternate_bytes);
    if (machine.stacks == nullptr)
        machine.stacks = (char *)mmap(nullptr, (size_t)MOST_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    machine.running = nullptr;
    machine.threads = block.x * block.y * block.z;
    if (machine.threads < 1 || machine.threads > MOST_THREADS) return "a thread block of 1 to 1024 threads is wanted";
    machine.body = body;
    machine.arguments = arguments;
    machine.grid = grid;
    machine.block = block;
    machine.seed = seed;

    struct sigaction action = {}, before_segv, before_bus;
    stack_t stack = {}, before_stack;
    stack.ss_sp = alternate;
    stack.ss_size = alternate_bytes;
    sigaltstack(&stack, &before_stack);
    action.sa_handler = on_fault;
    action.sa_flags = SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before_segv);
    sigaction(SIGBUS, &action, &before_bus);
    const char *message = nullptr;
    if (sigsetjmp(fault, 1)) {
        if (!setjmp(machine.failed)) fail("an address where nothing is");
        message = machine.message;
    } else if (setjmp(machine.failed)) {
        message = machine.message;
    } else {
        for (unsigned z = 0; z < grid.z; z++)
            for (unsigned y = 0; y < grid.y; y++)
                for (unsigned x = 0; x < grid.x; x++) {
                    machine.block_index = {x, y, z};
                    begin_block();
                }
    }
    sigaction(SIGSEGV, &before_segv, nullptr);
    sigaction(SIGBUS, &before_bus, nullptr);
    sigaltstack(&before_stack, nullptr);
    return message;
}

#ifdef ELEMENT_BF16
float element_to_float(u16 bits) {
    const u32 wide = (u32)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}
#else
static float *half_table() {
    static float table[1 << 16];
    for (u32 i = 0; i < 1 << 16; i++) {
        const u16 bits = (u16)i;
        _Float16 x;
        memcpy(&x, &bits, sizeof x);
        table[i] = (float)x;
    }
    return table;
}
float element_to_float(u16 bits) {
    static const float *table = half_table();
    return table[bits];
}
#endif

/* m16n8k16 over the fragments of a warp; see primitives.cuh. */
void multiply(unsigned char (*given)[EXCHANGE_BYTES], unsigned char (*taken)[EXCHANGE_BYTES]) {
    float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < WARP; lane++) {
        const MmaGiven &have = *(const MmaGiven *)given[lane];
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++)
            for (int half = 0; half < 2; half++)
                a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + half] = element_to_float((u16)(have.a[i] >> 16 * half));
        for (int i = 0; i < 2; i++)
            for (int half = 0; half < 2; half++)
                b[2 * t + 8 * i + half][g] = element_to_float((u16)(have.b[i] >> 16 * half));
        for (int i = 0; i < 4; i++) c[g + 8 * (i / 2)][2 * t + i % 2] = have.c[i];
    }
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 8; n++) c[m][n] += a[m][k] * b[k][n];
    for (int lane = 0; lane < WARP; lane++)
        for (int i = 0; i < 4; i++)
            ((MmaTaken *)taken[lane])->c[i] = c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
}

/* A kernel's arguments as a driver takes them: an array of pointers to their values. */
template <class... Arguments> struct Call {
    void (*kernel)(Arguments...);
    void **values;
    template <size_t... I> void with(std::index_sequence<I...>) {
        kernel(*(std::tuple_element_t<I, std::tuple<Arguments...>> *)values[I]...);
    }
    static void body(void *self) { ((Call *)self)->with(std::index_sequence_for<Arguments...>{}); }
};

template <class... Arguments>
const char *launch(void (*kernel)(Arguments...), const unsigned *shape, unsigned seed, void **values) {
    Call<Arguments...> call = {kernel, values};
    return run(Call<Arguments...>::body, &call, {shape[0], shape[1], shape[2]}, {shape[3], shape[4], shape[5]}, seed);
}

} // namespace emulation

/* emulated_NAME(shape, seed, values): null, or what went wrong. `shape`: grid x, y, z, thread block x, y, z. */
#define EMULATE(kernel)                                                                                                \
    extern "C" const char *emulated_##kernel(const unsigned *shape, unsigned seed, void **values) {                    \
        return emulation::launch(kernel, shape, seed, values);                                                         \
    }
