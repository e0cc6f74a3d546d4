/* A gradient compressor in C: what a shared library offers to ringdp.compression.load(path).
 *
 * The library has one function, ringdp_compressor_v1, that returns the address of a constant struct ringdp_compressor.
 * C99; nothing of ringdp is linked. Build it without -ffast-math and with -ffp-contract=off:
 *
 *     cc -std=c99 -O3 -fPIC -shared -ffp-contract=off my_codec.c -o libmy_codec.so \
 *         -I "$(python -c 'import ringdp; print(ringdp.compression.include_dir())')"
 *
 * A code stands for `count` float32 elements, count >= 1, and has size_bound(count) bytes, whatever the elements are.
 *
 * Blocks      An element's code depends on its block alone: elements i * block to (i + 1) * block of the call.
 *             Elements are cut at multiples of 256 from their parameter's first, at places that depend on the number
 *             of ranks: compressing a piece gives what compressing the whole gives there. Where in the code the bytes
 *             of a block lie is yours.
 * Threads     The functions are called by ringdp's threads and Python's, several at a time. They keep no state and do
 *             not wait, call Python, or write anywhere but to their outputs.
 * Memory      Floats are aligned to 4 bytes, codes not at all (use memcpy). No two arguments of a call overlap.
 *             Elements that are not outputs are not changed.
 * Bits        Equal elements give equal bytes, all of them written, on every rank and every kind of machine: nothing
 *             may depend on the processor, on earlier calls, on addresses or on what the memory held before. The
 *             rounding mode is to nearest, and subnormal numbers are kept.
 * Any bytes   Decoders get bytes from the network: whatever these are, they decode to something, and no memory outside
 *             the arguments is touched. So no length and no place is read from a code, unless it is checked.
 * NaN         Elements may be infinite or NaN. compress then returns RINGDP_NOT_FINITE, and the code decodes to an
 *             infinity or a NaN in that element's block: so the other ranks see the overflow. What else that block
 *             decodes to, and which NaN it is, is free. Finite elements decode to finite ones, but for codes of a
 *             smaller range, which may decode to an infinity (as float16 does).
 *
 * ringdp.testing.check_compressor tries all of that.
 */
#ifndef RINGDP_COMPRESSOR_H
#define RINGDP_COMPRESSOR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RINGDP_COMPRESSOR_ABI 1u

/* What compressing returns. Any other value is a failure: the operation ends on all ranks with an error that has the
 * value. */
enum { RINGDP_FINITE = 0, RINGDP_NOT_FINITE = 1 };

struct ringdp_compressor {
  uint32_t abi_version; /* RINGDP_COMPRESSOR_ABI */
  uint32_t struct_size; /* sizeof(struct ringdp_compressor) */

  const char* name;  /* 1 to 64 of A-Z a-z 0-9 _ . -; not that of another codec. Lives as long as the library. */
  uint32_t block;    /* elements whose codes belong together; divides 256; 1 where each element has its own */
  uint32_t reserved; /* 0 */

  /* Bytes of a code of `count` elements, exactly. Never fewer for more elements; at most 8 * count + 1024. */
  size_t (*size_bound)(size_t count);

  /* code = encode(x). */
  int (*compress)(void* code, const float* x, size_t count);

  /* Error feedback in the same pass: v = x + factor * residual; code = encode(v);
   * new_residual = (v - decode(code)) / factor, each operation rounded to float32. `factor` is a power of two, the loss
   * scale. What new_residual holds after RINGDP_NOT_FINITE is not used. NULL: made of compress and decode_set. */
  int (*compress_with_feedback)(void* code, const float* x, const float* residual, float* new_residual, float factor,
                                size_t count);

  /* out = decode(code). */
  void (*decode_set)(float* out, const void* code, size_t count);

  /* sum = sum + decode(code), one addition in float32 for each element. NULL: made of decode_set. */
  void (*decode_add)(float* sum, const void* code, size_t count);
};

#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
const struct ringdp_compressor* ringdp_compressor_v1(void);

#ifdef __cplusplus
}
#endif

#endif /* RINGDP_COMPRESSOR_H */
