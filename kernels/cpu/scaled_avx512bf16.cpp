// Four-bit formats times bf16 activations on AVX512-BF16: two exact products an addition.
//
// 64 bytes are 32 words of four codes each. Shifted by 0, 4, 8 and 12 bits, every word is an index
// into a table of bf16 numbers; the instruction looks at five bits of it, so the table holds the 16
// numbers twice. Inputs lie as the four look-ups find them. A sum of eight products belongs to
// inputs that share a scale. For three tokens and more two rows go side by side, so that inputs are
// loaded half as often; four are faster from the cache, and slower from memory.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12 warns of its own undefined vectors
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

namespace ftd {
namespace {

#include "inputs_avx512bf16.h"
#include "unpack_four_bits.h"
// needs the first
#include "four_bit_scales.h"

constexpr int kWidth = kStep / 4;

// R weight rows against C tokens; asks for the numbers and the scales that lie ahead.
template <class F, int R, int C>
void dot(const Rows& rows, const bf16* const* x, float* out, int64_t out_stride,
         const uint8_t* ahead, const uint8_t* scales_ahead) {
  const __m512i numbers = number_table(F::kBits);
  __m512 acc[C][R];
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) acc[c][r] = _mm512_setzero_ps();
  F scales[R];

  auto step = [&](int64_t k, int in_span, __mmask64 here) {
    __m512i words[R];
    for (int r = 0; r < R; ++r)
      words[r] = _mm512_maskz_loadu_epi8(here, rows.numbers + r * rows.number_bytes + k / 2);
    __m512 sum[C][R];
    for (int c = 0; c < C; ++c)
      for (int r = 0; r < R; ++r) sum[c][r] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512bh weight[R];
      for (int r = 0; r < R; ++r) {
        weight[r] = (__m512bh)_mm512_permutexvar_epi16(words[r], numbers);
        words[r] = _mm512_srli_epi16(words[r], 4);
      }
      for (int c = 0; c < C; ++c) {
        const __m512bh v = (__m512bh)_mm512_loadu_si512(x[c] + k + i * kWidth);
        for (int r = 0; r < R; ++r) sum[c][r] = _mm512_dpbf16_ps(sum[c][r], weight[r], v);
      }
    }
    for (int r = 0; r < R; ++r) {
      const __m512 scale = scales[r].spread(in_span);
      for (int c = 0; c < C; ++c) acc[c][r] = _mm512_fmadd_ps(scale, sum[c][r], acc[c][r]);
    }
  };
  in_spans<F, R>(rows, scales, ahead, scales_ahead, step);
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) out[c * out_stride + r] = _mm512_reduce_add_ps(acc[c][r]);
}

using Input = bf16;
#include "four_bit_rows.h"

// Input 4 i + j of a step goes to word i of look-up j.
void pack(const void* x, int type, int64_t first, int64_t count, int64_t inputs, int, void* group) {
  bf16* to = static_cast<bf16*>(group);
  const int64_t end = first + count == inputs ? round_up(inputs, kStep) : first + count;
  for (int64_t k = first; k < end; k += kPiece) {
    const __m512i in = by_nibble(load_inputs(x, type, k - first, count));
    bf16* at = to + k / kStep * kStep + k % kStep / 4;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_castsi512_si128(in));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at + kWidth), _mm512_extracti32x4_epi32(in, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at + 2 * kWidth), _mm512_extracti32x4_epi32(in, 2));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at + 3 * kWidth), _mm512_extracti32x4_epi32(in, 3));
  }
}

template <class F>
constexpr Matmul kMatmul = {1, kStep, sizeof(bf16), pack, matmul<F>};

}  // namespace

void use_avx512bf16_scaled(Kernels& kernels) {
  kernels.matmul[FTD_MXFP4][FTD_BF16] = &kMatmul<Mxfp4>;
  kernels.matmul[FTD_NVFP4][FTD_BF16] = &kMatmul<Nvfp4>;
  kernels.matmul[FTD_INT4][FTD_BF16] = &kMatmul<Int4>;
}

}  // namespace ftd

#endif
