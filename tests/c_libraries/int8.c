/* ringdp's int8 in C, to the bit, and what goes wrong with libraries, by macros:
 *   NAME, or NAMED  the codec's
 *   NO_FEEDBACK, NO_ADD   these functions are NULL
 *   HEADER          bytes before each code, which no codec of ringdp has
 *   VERSION, STRUCT_SIZE, BLOCK, RESERVED   other values of the struct
 *   NO_COMPRESS, NO_STRUCT, NO_ENTRY   what is missing
 *   BOUND           an expression of count in place of size_bound's
 *   SWALLOW         NaN and infinities become zeros, and nothing is said
 *   OVERRUN         bytes written behind the code
 *   DECODE_OVERRUN  floats written behind the output
 *   GREEDY          blocks share a scale
 *   LAZY            the last byte of a code is not written
 *   WRONG_RESIDUAL, WRONG_SUM   the fused functions do something else
 *   FAILS           what compress returns once it has been called with more than FAILS_FROM elements
 */
#include <ringdp/compressor.h>
#include <stdlib.h>
#include <string.h>

#ifdef NAMED
#undef NAME
#define NAME NAMED
#endif
#ifndef HEADER
#define HEADER 0
#endif
#ifndef OVERRUN
#define OVERRUN 0
#endif
#ifndef DECODE_OVERRUN
#define DECODE_OVERRUN 0
#endif
#ifndef FAILS_FROM
#define FAILS_FROM 0
#endif
#define ELEMENTS 256

static float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static size_t blocks_of(size_t count) { return (count + ELEMENTS - 1) / ELEMENTS; }

static size_t size_bound(size_t count) {
#ifdef BOUND
  return BOUND;
#else
  return HEADER + 4 * blocks_of(count) + count;
#endif
}

static int encode_block(unsigned char* scale_at, unsigned char* code, const float* x, size_t n) {
  const float rounder = 12582912.0f, tiny = float_of(27u << 23); /* 1.5 * 2^23, 2^-100 */
  uint32_t most = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  if (most >= 0x7f800000u) {
#ifdef SWALLOW
    memset(scale_at, 0, 4);
    memset(code, 0, n);
    return RINGDP_FINITE;
#else
    const float nan = float_of(0x7fc00000u);
    memcpy(scale_at, &nan, 4);
    memset(code, 0, n);
    return RINGDP_NOT_FINITE;
#endif
  }
  const float largest = float_of(most);
  const float scale = largest / 127.0f;
  memcpy(scale_at, &scale, 4);
  const int plain = largest == 0.0f || largest >= tiny;
  const float before = plain ? 1.0f : float_of(187u << 23); /* 2^60 */
  const float inverse = largest == 0.0f ? 0.0f : 127.0f / (largest * before);
  for (size_t i = 0; i < n; ++i) {
    float y = (x[i] * before) * inverse;
    if (!plain) y = y > 127.0f ? 127.0f : y < -127.0f ? -127.0f : y;
    code[i] = (unsigned char)bits_of(y + rounder);
  }
  return RINGDP_FINITE;
}

static int compress(void* to, const float* x, size_t count) {
  unsigned char* scales = (unsigned char*)to + HEADER;
  unsigned char* codes = scales + 4 * blocks_of(count);
  int seen = RINGDP_FINITE;
  memset(to, 0x11, HEADER);
#ifdef FAILS
  if (count > FAILS_FROM) return FAILS;
#endif
  for (size_t at = 0; at < count; at += ELEMENTS) {
    const size_t n = count - at < ELEMENTS ? count - at : ELEMENTS;
#ifdef LAZY
    if (at + n == count) {
      unsigned char last[ELEMENTS];
      seen |= encode_block(scales + 4 * (at / ELEMENTS), last, x + at, n);
      memcpy(codes + at, last, n - 1);
      continue;
    }
#endif
    seen |= encode_block(scales + 4 * (at / ELEMENTS), codes + at, x + at, n);
  }
#ifdef GREEDY
  for (size_t block = 1; block < blocks_of(count); ++block) memcpy(scales + 4 * block, scales, 4);
#endif
  for (size_t i = 0; i < OVERRUN; ++i) codes[count + i] = 0x77;
  return seen;
}

static void decode_set(float* out, const void* from, size_t count) {
  const unsigned char* scales = (const unsigned char*)from + HEADER;
  const unsigned char* codes = scales + 4 * blocks_of(count);
  for (size_t at = 0; at < count; at += ELEMENTS) {
    const size_t n = count - at < ELEMENTS ? count - at : ELEMENTS;
    float scale;
    memcpy(&scale, scales + 4 * (at / ELEMENTS), 4);
    for (size_t i = at; i < at + n; ++i) out[i] = (float)(signed char)codes[i] * scale;
  }
  for (size_t i = 0; i < DECODE_OVERRUN; ++i) out[count + i] = 1.0f;
}

#ifndef NO_ADD
static void decode_add(float* sum, const void* from, size_t count) {
  const unsigned char* scales = (const unsigned char*)from + HEADER;
  const unsigned char* codes = scales + 4 * blocks_of(count);
  for (size_t i = 0; i < count; ++i) {
    float scale;
    memcpy(&scale, scales + 4 * (i / ELEMENTS), 4);
#ifdef WRONG_SUM
    sum[i] = (float)(signed char)codes[i] * scale;
#else
    sum[i] += (float)(signed char)codes[i] * scale;
#endif
  }
}
#else
#define decode_add NULL
#endif

#ifndef NO_FEEDBACK
static int compress_with_feedback(void* to, const float* x, const float* residual, float* new_residual, float factor,
                                  size_t count) {
  unsigned char* scales = (unsigned char*)to + HEADER;
  unsigned char* codes = scales + 4 * blocks_of(count);
  int seen = RINGDP_FINITE;
  memset(to, 0x11, HEADER);
  for (size_t at = 0; at < count; at += ELEMENTS) {
    const size_t n = count - at < ELEMENTS ? count - at : ELEMENTS;
    float v[ELEMENTS], scale;
    for (size_t i = 0; i < n; ++i) v[i] = x[at + i] + factor * residual[at + i];
    seen |= encode_block(scales + 4 * (at / ELEMENTS), codes + at, v, n);
    memcpy(&scale, scales + 4 * (at / ELEMENTS), 4);
    for (size_t i = 0; i < n; ++i) {
      const float left = v[i] - (float)(signed char)codes[at + i] * scale;
#ifdef WRONG_RESIDUAL
      new_residual[at + i] = left;
#else
      new_residual[at + i] = left / factor;
#endif
    }
  }
  return seen;
}
#else
#define compress_with_feedback NULL
#endif

#ifdef NO_COMPRESS
#define THE_COMPRESS NULL
#else
#define THE_COMPRESS compress
#endif
#ifndef VERSION
#define VERSION RINGDP_COMPRESSOR_ABI
#endif
#ifndef STRUCT_SIZE
#define STRUCT_SIZE sizeof(struct ringdp_compressor)
#endif
#ifndef BLOCK
#define BLOCK ELEMENTS
#endif
#ifndef RESERVED
#define RESERVED 0
#endif
#ifdef NO_ENTRY
#define ringdp_compressor_v1 something_else
#endif

const struct ringdp_compressor* ringdp_compressor_v1(void) {
  static const struct ringdp_compressor it = {
      VERSION,    STRUCT_SIZE, NAME, BLOCK, RESERVED, size_bound, THE_COMPRESS, compress_with_feedback,
      decode_set, decode_add,
  };
  (void)compress;
#ifdef NO_STRUCT
  return NULL;
#else
  return &it;
#endif
}
