/* A gradient compressor in C: 8 bits an element, and a byte for 64 of them: the power of two that makes them whole
 * numbers.
 *
 *     cc -std=c99 -O3 -fPIC -shared -ffp-contract=off -I RINGDP/include c_compressor.c -o libshift8.so
 *
 * c_compressor.py builds it, has it checked and trains with it. A code is one byte of exponent for each block, then the
 * elements' bytes. With E the upper bits of the largest element of a block, that is,
 * 2^(E - 127) <= largest < 2^(E - 126), the step is 2^(E - 133), so that the largest is from 64 to 128 steps; 128
 * becomes 127.
 */
#include <ringdp/compressor.h>
#include <string.h>

#define BLOCK 64
#define NOT_A_NUMBER 255 /* an exponent that no finite block has */
#define LEAST 7          /* below it steps would be subnormal */

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* 2^(E - 133) and its inverse. Any byte may come from the network. */
static float step_of(uint32_t exponent) {
  if (exponent == NOT_A_NUMBER) return float_of(0x7fc00000u);
  return float_of(((exponent < LEAST ? LEAST : exponent) - 6) << 23);
}

static float steps_per_one(uint32_t exponent) { return float_of((260 - exponent) << 23); }

static size_t blocks_of(size_t count) { return (count + BLOCK - 1) / BLOCK; }

static size_t length_of(size_t block, size_t count) {
  return count - block * BLOCK < BLOCK ? count - block * BLOCK : BLOCK;
}

static size_t size_bound(size_t count) { return blocks_of(count) + count; }

static int encode_block(uint8_t* exponent, uint8_t* code, const float* x, size_t n) {
  uint32_t largest = 0, e;
  float inverse;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  e = largest >> 23;
  *exponent = (uint8_t)e;
  if (e == NOT_A_NUMBER) {
    memset(code, 0, n); /* every byte of a code is written */
    return RINGDP_NOT_FINITE;
  }
  inverse = steps_per_one(e < LEAST ? LEAST : e);
  for (size_t i = 0; i < n; ++i) {
    /* 1.5 * 2^23 + y has the nearest whole number, ties to even, in its low bits: a loop that compilers vectorise. */
    const float y = x[i] * inverse;
    code[i] = (uint8_t)bits_of((y > 127.0f ? 127.0f : y < -127.0f ? -127.0f : y) + 12582912.0f);
  }
  return RINGDP_FINITE;
}

static void decode_block(float* out, uint8_t exponent, const uint8_t* code, size_t n) {
  const float step = step_of(exponent);
  for (size_t i = 0; i < n; ++i) out[i] = (float)(int8_t)code[i] * step;
}

static int compress(void* to, const float* x, size_t count) {
  const size_t blocks = blocks_of(count);
  uint8_t* exponents = to;
  uint8_t* code = exponents + blocks;
  int seen = RINGDP_FINITE;
  for (size_t b = 0; b < blocks; ++b)
    seen |= encode_block(exponents + b, code + b * BLOCK, x + b * BLOCK, length_of(b, count));
  return seen;
}

/* Without it, ringdp would compress x + factor * residual and decode that: one more pass over the elements. */
static int compress_with_feedback(void* to, const float* x, const float* residual, float* new_residual, float factor,
                                  size_t count) {
  const size_t blocks = blocks_of(count);
  uint8_t* exponents = to;
  uint8_t* code = exponents + blocks;
  int seen = RINGDP_FINITE;
  for (size_t b = 0; b < blocks; ++b) {
    const size_t begin = b * BLOCK, n = length_of(b, count);
    float v[BLOCK], decoded[BLOCK];
    for (size_t i = 0; i < n; ++i) v[i] = x[begin + i] + factor * residual[begin + i];
    seen |= encode_block(exponents + b, code + begin, v, n);
    decode_block(decoded, exponents[b], code + begin, n);
    for (size_t i = 0; i < n; ++i) new_residual[begin + i] = (v[i] - decoded[i]) / factor;
  }
  return seen;
}

static void decode_set(float* out, const void* from, size_t count) {
  const size_t blocks = blocks_of(count);
  const uint8_t* exponents = from;
  const uint8_t* code = exponents + blocks;
  for (size_t b = 0; b < blocks; ++b)
    decode_block(out + b * BLOCK, exponents[b], code + b * BLOCK, length_of(b, count));
}

const struct ringdp_compressor* ringdp_compressor_v1(void) {
  static const struct ringdp_compressor shift8 = {
      RINGDP_COMPRESSOR_ABI,
      sizeof(struct ringdp_compressor),
      "shift8",
      BLOCK,
      0,
      size_bound,
      compress,
      compress_with_feedback,
      decode_set,
      NULL, /* decode_add: ringdp makes it of decode_set */
  };
  return &shift8;
}
