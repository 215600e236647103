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

constexpr int kStep = 128;  // inputs of 64 bytes
constexpr int kWidth = kStep / 4;
constexpr int kSpan = 4 * kStep;  // inputs whose scales are widened at a time

// Scales of a span, and those of one of its steps: each for the sums of its inputs.

// Sixteen of 32 inputs.
__m512 spread_four(__m512 scales, int step) {
  const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutexvar_ps(_mm512_add_epi32(which, _mm512_set1_epi32(4 * step)), scales);
}

struct Mxfp4 {
  static constexpr int kColumns = 32, kScaleBytes = 1;
  static constexpr const uint16_t (&kBits)[16] = kFp4Bits;
  __m512 scales;
  void load(const uint8_t* p, int64_t count, float) {
    const __m128i bytes = _mm_maskz_loadu_epi8(__mmask16((1u << count) - 1), p);
    scales = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
  }
  __m512 spread(int step) const { return spread_four(scales, step); }
};

struct Nvfp4 {
  static constexpr int kColumns = 16, kScaleBytes = 1;
  static constexpr const uint16_t (&kBits)[16] = kFp4Bits;
  __m512 scales[2];
  void load(const uint8_t* p, int64_t count, float factor) {
    const uint32_t some = count == 32 ? 0xffffffff : (1u << count) - 1;
    // as float16, whose exponent has a bias of 15, not 7; the sign comes to bit 14, too
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(some, p));
    const __m512i half =
        _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(int16_t(0xbf80)));
    const __m512 unit = _mm512_set1_ps(factor * 256.0f);
    scales[0] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), unit);
    scales[1] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)), unit);
  }
  __m512 spread(int step) const {
    const __m512i which = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(_mm512_add_epi32(which, _mm512_set1_epi32(8 * (step % 2))),
                                 scales[step / 2]);
  }
};

struct Int4 {
  static constexpr int kColumns = 32, kScaleBytes = 2;
  static constexpr const uint16_t (&kBits)[16] = kInt4Bits;
  __m512 scales;
  void load(const uint8_t* p, int64_t count, float) {
    const __m256i words = _mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), p);
    scales = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
  __m512 spread(int step) const { return spread_four(scales, step); }
};

struct Rows {
  const uint8_t* numbers;
  const uint8_t* scales;
  int64_t number_bytes, scale_bytes;  // of a row
  float factor;
  int64_t inputs;
};

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
  auto load_scales = [&](int64_t k, int64_t count) {
    for (int r = 0; r < R; ++r) {
      scales[r].load(rows.scales + r * rows.scale_bytes + k / F::kColumns * F::kScaleBytes, count,
                     rows.factor);
    }
  };
  auto prefetch = [&] {
    for (int r = 0; r < R; ++r) __builtin_prefetch(ahead + 64 * r, 0, 2);
    ahead += 64 * R;
  };

  for (int r = 0; r < R; ++r)
    for (int64_t at = 0; at < rows.scale_bytes; at += 64)
      __builtin_prefetch(scales_ahead + r * rows.scale_bytes + at, 0, 2);
  int64_t k = 0;
  for (; k + kSpan <= rows.inputs; k += kSpan) {
    load_scales(k, kSpan / F::kColumns);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      prefetch();
      step(k + i * kStep, i, ~0ull);
    }
  }
  if (k < rows.inputs) {
    load_scales(k, (rows.inputs - k) / F::kColumns);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int64_t left = rows.inputs - k - i * kStep;
      if (left <= 0) break;
      prefetch();
      step(k + i * kStep, i, left >= kStep ? ~0ull : (1ull << left / 2) - 1);
    }
  }
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) out[c * out_stride + r] = _mm512_reduce_add_ps(acc[c][r]);
}

template <class F, int R, int C>
void dot_rows(const MatmulCall& call, int64_t row, int64_t end, int64_t token, bool from_memory) {
  const bf16* x[C];
  for (int c = 0; c < C; ++c) x[c] = static_cast<const bf16*>(call.x[token + c]);
  const int64_t number_bytes = call.inputs / 2;
  const int64_t scale_bytes = call.inputs / F::kColumns * F::kScaleBytes;
  for (; row + R <= end; row += R) {
    const int64_t first = call.first_row + row;
    const Rows rows = {call.weight + row * number_bytes,
                       call.matrix->scales + first * scale_bytes,
                       number_bytes,
                       scale_bytes,
                       call.matrix->factor,
                       call.inputs};
    const int64_t ahead = from_memory ? prefetch_after(call, row, R, number_bytes) : 0;
    dot<F, R, C>(rows, x, call.out + token * call.out_stride + row, call.out_stride,
                 rows.numbers + ahead,
                 rows.scales + least(ahead, call.prefetch_bytes) / number_bytes * scale_bytes);
  }
  if constexpr (R > 1) {
    if (row < end) dot_rows<F, 1, C>(call, row, end, token, false);
  }
}

#include "rows_avx512bf16.h"

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
