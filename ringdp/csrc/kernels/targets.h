// The target attributes of functions that loop, one per instruction set (dispatch.cpp asks the CPU for the same
// features). x86-64 only. Compilers prefer 256-bit vectors unless these say otherwise. Constant data; any thread.
#pragma once

#define RINGDP_TARGET_AVX2 __attribute__((target("avx2,f16c")))
#if defined(__clang__)
#define RINGDP_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"), min_vector_width(512)))
#else
#define RINGDP_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512")))
#endif
