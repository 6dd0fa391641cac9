/* What this machine can run, and what built this library. */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* 1 if the processor and the system can run code of that instruction set. */
int jitney_supports(const char *isa) {
    if (!strcmp(isa, "portable")) return 1;
#if defined(__x86_64__)
    unsigned a, b, c, d;
    int half = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    int avx2 = half && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!strcmp(isa, "avx2")) return avx2;
    if (!strcmp(isa, "avx512"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
    return 0;
}

/* The compiler's own name for itself. */
const char *jitney_compiler(void) {
#if defined(__clang__)
    return "clang " __clang_version__;
#else
    return "gcc " __VERSION__;
#endif
}

/* 1 if loops are spread over threads. */
int jitney_threaded(void) {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

/* 1 if products of pairs of int16 are summed by one instruction (vpdpwssd). */
int jitney_vnni(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512vnni") != 0;
#else
    return 0;
#endif
}
