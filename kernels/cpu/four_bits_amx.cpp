// Four-bit formats times few bf16 activations, in float32: for processors with AMX, on which a
// vdpbf16ps takes as long as four fused multiply-adds.
//
// 64 bytes are 16 words of eight codes each. Shifted by 0, 4 .. 28 bits, every word is an index
// into a table of 16 numbers: the instruction looks at four bits of it. Inputs are widened and lie
// as the eight look-ups find them. Products are exact; a sum of eight belongs to inputs that share
// a scale.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12 warns of its own undefined vectors
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

namespace ftd {
namespace {

#include "inputs_avx512bf16.h"
// needs the one above
#include "four_bit_scales.h"

constexpr int kCodes = 8;   // of a word
constexpr int kWidth = 16;  // words, and numbers of a look-up

__m512 number_table(const uint16_t (&bits)[16]) {
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// R weight rows against C tokens; asks for the numbers and the scales that lie ahead.
template <class F, int R, int C>
void dot(const Rows& rows, const float* const* x, float* out, int64_t out_stride,
         const uint8_t* ahead, const uint8_t* scales_ahead) {
  const __m512 numbers = number_table(F::kBits);
  __m512 acc[C][R];
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) acc[c][r] = _mm512_setzero_ps();
  F scales[R];

  auto step = [&](int64_t k, int in_span, __mmask64 here) {
    __m512i words[R];
    for (int r = 0; r < R; ++r)
      words[r] = _mm512_maskz_loadu_epi8(here, rows.numbers + r * rows.number_bytes + k / 2);
    __m512 sum[C][R];
#pragma GCC unroll 8
    for (int i = 0; i < kCodes; ++i) {
      __m512 weight[R];
      for (int r = 0; r < R; ++r)
        weight[r] = _mm512_permutexvar_ps(_mm512_srli_epi32(words[r], 4 * i), numbers);
      for (int c = 0; c < C; ++c) {
        const __m512 v = _mm512_loadu_ps(x[c] + k + i * kWidth);
        for (int r = 0; r < R; ++r) {
          sum[c][r] = i ? _mm512_fmadd_ps(weight[r], v, sum[c][r]) : _mm512_mul_ps(weight[r], v);
        }
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

using Input = float;
#include "four_bit_rows.h"

// Input 8 i + j of a step goes to word i of look-up j.
void pack(const void* x, int type, int64_t first, int64_t count, int64_t inputs, int, void* group) {
  float* to = static_cast<float*>(group);
  const __m512i which = _mm512_setr_epi32(
      0x080000, 0x180010, 0x090001, 0x190011, 0x0a0002, 0x1a0012, 0x0b0003, 0x1b0013, 0x0c0004,
      0x1c0014, 0x0d0005, 0x1d0015, 0x0e0006, 0x1e0016, 0x0f0007, 0x1f0017);
  const int64_t end = first + count == inputs ? round_up(inputs, kStep) : first + count;
  for (int64_t k = first; k < end; k += kPiece) {
    alignas(64) bf16 in[kPiece];
    _mm512_store_si512(in, _mm512_permutexvar_epi16(which, load_inputs(x, type, k - first, count)));
    float* at = to + k / kStep * kStep + k % kStep / kCodes;
    for (int i = 0; i < kPiece; ++i) at[i / 4 * kWidth + i % 4] = widen(in[i]);
  }
}

template <class F>
constexpr Matmul kMatmul = {1, kStep, sizeof(float), pack, matmul<F>};

}  // namespace

void use_amx_four_bits(Kernels& kernels) {
  kernels.matmul[FTD_MXFP4][FTD_BF16] = &kMatmul<Mxfp4>;
  kernels.matmul[FTD_NVFP4][FTD_BF16] = &kMatmul<Nvfp4>;
  kernels.matmul[FTD_INT4][FTD_BF16] = &kMatmul<Int4>;
}

}  // namespace ftd

#endif
