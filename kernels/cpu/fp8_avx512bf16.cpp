// FP8 weights times bf16 activations on AVX512-BF16: two exact products an addition.
//
// 64 bytes are 32 words of two codes: inputs lie as the even and the odd ones find them. Rows go
// as in scaled_avx512bf16.cpp.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12 warns of its own undefined vectors
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

namespace ftd {
namespace {

#include "inputs_avx512bf16.h"
#include "unpack_fp8.h"

constexpr int kLine = 64;         // inputs of a register, two registers of numbers
constexpr int kStep = 2 * kLine;  // inputs of a step, which share a scale

// 64 codes: the even ones, then the odd ones.
void unpack_fp8(__m512i codes, __m512i& even, __m512i& odd) {
  const __m512i high = _mm512_slli_epi16(codes, 8);
  if (__builtin_expect(_mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78)) == 0, 1)) {
    even = normal_fp8(high);
    odd = normal_fp8(codes);
  } else {
    even = any_fp8(high);
    odd = any_fp8(codes);
  }
}

// Where scales lie: one for 128 rows and 128 inputs, or one for a row.
struct Block {
  static const float* scales(const Matrix& m, int64_t row) {
    return reinterpret_cast<const float*>(m.scales) + row / 128 * ((m.inputs + 127) / 128);
  }
  static constexpr int kNext = 1;
};
struct Row {
  static const float* scales(const Matrix& m, int64_t row) {
    return reinterpret_cast<const float*>(m.scales) + row;
  }
  static constexpr int kNext = 0;
};

// R weight rows against C tokens; asks for what lies ahead.
template <class F, int R, int C>
void dot(const uint8_t* w, int64_t inputs, const float* const* scales, const bf16* const* x,
         float* out, int64_t out_stride, const uint8_t* ahead) {
  __m512 acc[C][R];
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) acc[c][r] = _mm512_setzero_ps();

  auto step = [&](int64_t k, const __mmask64* here) {
    __m512 sum[C][R];
    for (int c = 0; c < C; ++c)
      for (int r = 0; r < R; ++r) sum[c][r] = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      __m512i even[R], odd[R];
      for (int r = 0; r < R; ++r)
        unpack_fp8(_mm512_maskz_loadu_epi8(here[i], w + r * inputs + k + i * kLine), even[r],
                   odd[r]);
      for (int c = 0; c < C; ++c) {
        const bf16* from = x[c] + k + i * kLine;
        const __m512bh first = (__m512bh)_mm512_loadu_si512(from);
        const __m512bh second = (__m512bh)_mm512_loadu_si512(from + kLine / 2);
        for (int r = 0; r < R; ++r) {
          sum[c][r] = _mm512_dpbf16_ps(sum[c][r], (__m512bh)even[r], first);
          sum[c][r] = _mm512_dpbf16_ps(sum[c][r], (__m512bh)odd[r], second);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      const __m512 scale = _mm512_set1_ps(scales[r][k / kStep * F::kNext]);
      for (int c = 0; c < C; ++c) acc[c][r] = _mm512_fmadd_ps(scale, sum[c][r], acc[c][r]);
    }
    for (int line = 0; line < 2 * R; ++line) __builtin_prefetch(ahead + 64 * line, 0, 2);
    ahead += 2 * R * 64;
  };
  int64_t k = 0;
  const __mmask64 all[2] = {~0ull, ~0ull};
  for (; k + kStep <= inputs; k += kStep) step(k, all);
  if (k < inputs) {
    const int64_t left = inputs - k;
    const __mmask64 some[2] = {left >= kLine ? ~0ull : (1ull << left) - 1,
                               left > kLine ? (1ull << (left - kLine)) - 1 : 0};
    step(k, some);
  }
  for (int c = 0; c < C; ++c) {
    for (int r = 0; r < R; ++r) acc[c][r] = _mm512_mul_ps(acc[c][r], _mm512_set1_ps(kFp8Unit));
    for (int r = 0; r < R; ++r) out[c * out_stride + r] = _mm512_reduce_add_ps(acc[c][r]);
  }
}

template <class F, int R, int C>
void dot_rows(const MatmulCall& call, int64_t row, int64_t end, int64_t token, bool from_memory) {
  const bf16* x[C];
  for (int c = 0; c < C; ++c) x[c] = static_cast<const bf16*>(call.x[token + c]);
  for (; row + R <= end; row += R) {
    const float* scales[R];
    for (int r = 0; r < R; ++r) scales[r] = F::scales(*call.matrix, call.first_row + row + r);
    const uint8_t* w = call.weight + row * call.inputs;
    const int64_t ahead = from_memory ? prefetch_after(call, row, R, call.inputs) : 0;
    dot<F, R, C>(w, call.inputs, scales, x, call.out + token * call.out_stride + row,
                 call.out_stride, w + ahead);
  }
  if constexpr (R > 1) {
    if (row < end) dot_rows<F, 1, C>(call, row, end, token, false);
  }
}

#include "rows_avx512bf16.h"

// The even inputs of a line, then its odd ones.
void pack(const void* x, int type, int64_t first, int64_t count, int64_t inputs, int, void* group) {
  bf16* to = static_cast<bf16*>(group);
  const int64_t end = first + count == inputs ? round_up(inputs, kStep) : first + count;
  for (int64_t k = first; k < end; k += kPiece) {
    const __m512i in = by_byte(load_inputs(x, type, k - first, count));
    bf16* at = to + k / kLine * kLine + k % kLine / 2;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_castsi512_si256(in));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + kLine / 2),
                        _mm512_extracti64x4_epi64(in, 1));
  }
}

template <class F>
constexpr Matmul kMatmul = {1, kStep, sizeof(bf16), pack, matmul<F>};

}  // namespace

void use_avx512bf16_fp8(Kernels& kernels) {
  kernels.matmul[FTD_FP8][FTD_BF16] = &kMatmul<Block>;
  kernels.matmul[FTD_FP8_ROW][FTD_BF16] = &kMatmul<Row>;
}

}  // namespace ftd

#endif
