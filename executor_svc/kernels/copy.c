/* Blocks copied and hashed in one pass: xxh3_64 (seed 0) as its specification says for inputs above 240 bytes. */
#include <stdint.h>

#include "vec.h"

#define STRIPE 64          /* bytes: eight 64-bit lanes */
#define SECRET_BYTES 192
#define STRIPES_A_BLOCK 16 /* (SECRET_BYTES - STRIPE) / 8: each stripe takes the secret 8 bytes further on */

static const uint8_t secret[SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define P32_1 0x9E3779B1u
#define P32_2 0x85EBCA77u
#define P32_3 0xC2B2AE3Du
#define P64_1 0x9E3779B185EBCA87u
#define P64_2 0xC2B2AE3D27D4EB4Fu
#define P64_3 0x165667B19E3779F9u
#define P64_4 0x85EBCA77C2B2AE63u
#define P64_5 0x27D4EB2F165667C5u

/* The eight lanes, as the instruction set has them. step: lanes += the stripe, crosswise, and += low half times high half
 * of (stripe ^ key). The stripe is stored to `to` on the way: not (READ), as usual (STORE), past the caches (STREAM). */
#if defined(ISA_AVX512)
typedef struct { __m512i v[1]; } lanes;
#define PARTS 1
typedef __m512i part;
INLINE part p_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void p_store(void *p, part v) { _mm512_storeu_si512(p, v); }
INLINE void p_stream(void *p, part v) { _mm512_stream_si512(p, v); }
INLINE part p_add(part a, part b) { return _mm512_add_epi64(a, b); }
INLINE part p_xor(part a, part b) { return _mm512_xor_si512(a, b); }
INLINE part p_high(part a) { return _mm512_srli_epi64(a, 32); }
INLINE part p_low_mul(part a, part b) { return _mm512_mul_epu32(a, b); }
INLINE part p_crossed(part a) { return _mm512_shuffle_epi32(a, _MM_PERM_BADC); }
INLINE part p_shift47(part a) { return _mm512_srli_epi64(a, 47); }
INLINE part p_left32(part a) { return _mm512_slli_epi64(a, 32); }
INLINE part p_set32(uint32_t x) { return _mm512_set1_epi64(x); }
#elif defined(ISA_AVX2)
typedef struct { __m256i v[2]; } lanes;
#define PARTS 2
typedef __m256i part;
INLINE part p_load(const void *p) { return _mm256_loadu_si256(p); }
INLINE void p_store(void *p, part v) { _mm256_storeu_si256(p, v); }
INLINE void p_stream(void *p, part v) { _mm256_stream_si256(p, v); }
INLINE part p_add(part a, part b) { return _mm256_add_epi64(a, b); }
INLINE part p_xor(part a, part b) { return _mm256_xor_si256(a, b); }
INLINE part p_high(part a) { return _mm256_srli_epi64(a, 32); }
INLINE part p_low_mul(part a, part b) { return _mm256_mul_epu32(a, b); }
INLINE part p_crossed(part a) { return _mm256_shuffle_epi32(a, 0x4E); }
INLINE part p_shift47(part a) { return _mm256_srli_epi64(a, 47); }
INLINE part p_left32(part a) { return _mm256_slli_epi64(a, 32); }
INLINE part p_set32(uint32_t x) { return _mm256_set1_epi64x(x); }
#else
typedef uint64_t part __attribute__((vector_size(16), may_alias));
typedef part part_any __attribute__((aligned(1)));
typedef struct { part v[4]; } lanes;
#define PARTS 4
INLINE part p_load(const void *p) { return *(const part_any *)p; }
INLINE void p_store(void *p, part v) { *(part_any *)p = v; }
INLINE void p_stream(void *p, part v) { *(part *)p = v; }
INLINE part p_add(part a, part b) { return a + b; }
INLINE part p_xor(part a, part b) { return a ^ b; }
INLINE part p_high(part a) { return a >> 32; }
INLINE part p_low_mul(part a, part b) { return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu); }
INLINE part p_crossed(part a) { return (part){a[1], a[0]}; }
INLINE part p_shift47(part a) { return a >> 47; }
INLINE part p_left32(part a) { return a << 32; }
INLINE part p_set32(uint32_t x) { return (part){x, x}; }
#endif
#define PART_BYTES ((int)sizeof(part))

enum { READ, STORE, STREAM };

INLINE void stripe(lanes *sums, const uint8_t *from, const uint8_t *key, uint8_t *to, int how) {
    for (int i = 0; i < PARTS; i++) {
        part data = p_load(from + i * PART_BYTES);
        if (how == STORE) p_store(to + i * PART_BYTES, data);
        if (how == STREAM) p_stream(to + i * PART_BYTES, data);
        part mixed = p_xor(data, p_load(key + i * PART_BYTES));
        part product = p_low_mul(mixed, p_high(mixed));
        sums->v[i] = p_add(p_add(sums->v[i], p_crossed(data)), product);
    }
}

INLINE void scramble(lanes *sums) {
    part prime = p_set32(P32_1);
    for (int i = 0; i < PARTS; i++) {
        part x = sums->v[i];
        x = p_xor(p_xor(x, p_shift47(x)), p_load(secret + SECRET_BYTES - STRIPE + i * PART_BYTES));
        sums->v[i] = p_add(p_low_mul(x, prime), p_left32(p_low_mul(p_high(x), prime))); /* x * prime, 64 bits */
    }
}

INLINE uint64_t word(const void *p) {
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

INLINE uint64_t folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

INLINE uint64_t merged(const lanes *sums, int64_t bytes) {
    uint64_t x[8], result = (uint64_t)bytes * P64_1;
    memcpy(x, sums, sizeof x);
    for (int i = 0; i < 4; i++)
        result += folded(x[2 * i] ^ word(secret + 11 + 16 * i), x[2 * i + 1] ^ word(secret + 19 + 16 * i));
    result ^= result >> 37;
    result *= 0x165667919E3779F9u;
    return result ^ result >> 32;
}

/* Copies `bytes` (above 240), or only reads them, and returns their xxh3_64. */
INLINE uint64_t copy_hashed(const uint8_t *from, uint8_t *to, int64_t bytes, int how) {
    static const uint64_t start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    lanes sums;
    memcpy(&sums, start, sizeof sums);
    int64_t stripes = (bytes - 1) / STRIPE, done = 0;
    while (stripes - done >= STRIPES_A_BLOCK) {
        for (int i = 0; i < STRIPES_A_BLOCK; i++, done++)
            stripe(&sums, from + done * STRIPE, secret + 8 * i, to + done * STRIPE, how);
        scramble(&sums);
    }
    for (int i = 0; done < stripes; i++, done++)
        stripe(&sums, from + done * STRIPE, secret + 8 * i, to + done * STRIPE, how);
    stripe(&sums, from + bytes - STRIPE, secret + SECRET_BYTES - STRIPE - 7, to, READ);
    if (how != READ) memcpy(to + done * STRIPE, from + done * STRIPE, bytes - done * STRIPE);
    return merged(&sums, bytes);
}

/* `count` blocks from their addresses to others; no two overlap. hashes[i] is of block i. Targets are written past the
 * caches: blocks are not read again soon, and what is not fetched before it is overwritten need not be waited for. */
void NAME(copy_blocks)(const uint64_t *from, const uint64_t *to, int64_t count, int64_t bytes, uint64_t *hashes) {
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *source = (const uint8_t *)(uintptr_t)from[i];
        uint8_t *target = (uint8_t *)(uintptr_t)to[i];
        hashes[i] = to[i] % STRIPE ? copy_hashed(source, target, bytes, STORE)
                                   : copy_hashed(source, target, bytes, STREAM);
    }
#if defined(ISA_AVX512) || defined(ISA_AVX2)
    _mm_sfence(); /* what was streamed is there before anybody is told */
#endif
}

/* hashes[i] of each of `count` blocks, where they are. */
void NAME(hash_blocks)(const uint64_t *at, int64_t count, int64_t bytes, uint64_t *hashes) {
    for (int64_t i = 0; i < count; i++) {
        uint8_t *block = (uint8_t *)(uintptr_t)at[i];
        hashes[i] = copy_hashed(block, block, bytes, READ);
    }
}
