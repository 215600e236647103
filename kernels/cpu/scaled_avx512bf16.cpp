// Four-bit formats times bf16 activations on AVX512-BF16: two exact products an addition.
//
// 64 bytes are 32 words of four codes each. Shifted by 0, 4, 8 and 12 bits, every word is an index
// into a table of bf16 numbers; the instruction looks at five bits of it, so the table holds the 16
// numbers twice. Inputs lie as the four look-ups find them. A sum of eight products belongs to
// inputs that share a scale. The order of additions depends on the place in the row alone.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12 warns of its own undefined vectors
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

namespace ftd {
namespace {

constexpr int kStep = 128;  // inputs of 64 bytes
constexpr int kWidth = kStep / 4;
constexpr int kStretch = 4096;  // inputs whose scales are widened at a time
constexpr int kRowTokens = 6;

struct Mxfp4 {
  static constexpr int kColumns = 32, kScaleBytes = 1;
  static constexpr const uint16_t (&kBits)[16] = kFp4Bits;
  static float widen_scale(const uint8_t* p, float) { return widen_e8m0(*p); }
};

struct Nvfp4 {
  static constexpr int kColumns = 16, kScaleBytes = 1;
  static constexpr const uint16_t (&kBits)[16] = kFp4Bits;
  static float widen_scale(const uint8_t* p, float factor) { return widen_e4m3(*p) * factor; }
};

struct Int4 {
  static constexpr int kColumns = 32, kScaleBytes = 2;
  static constexpr const uint16_t (&kBits)[16] = kInt4Bits;
  static float widen_scale(const uint8_t* p, float) {
    return widen(*reinterpret_cast<const bf16*>(p));
  }
};

template <class F>
__m512i table() {
  const __m256i once = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(F::kBits));
  return _mm512_broadcast_i64x4(once);
}

// The scales of a step, each for the sums of its inputs.
template <class F>
__m512 spread(const float* s) {
  const __m512i which = F::kColumns == 16
                            ? _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7)
                            : _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutexvar_ps(which, _mm512_castps256_ps512(_mm256_loadu_ps(s)));
}

// One weight row against C tokens.
template <class F, int C>
void dot(const uint8_t* w, const uint8_t* scales, float factor, int64_t inputs,
         const bf16* const* x, float* out, int64_t out_stride, int64_t prefetch_bytes) {
  const __m512i numbers = table<F>();
  __m512 acc[C];
  for (int c = 0; c < C; ++c) acc[c] = _mm512_setzero_ps();
  float s[kStretch / 16 + 8];  // spread reads eight

  auto step = [&](const uint8_t* p, int64_t k, int64_t in_stretch) {
    const __m512i words = _mm512_loadu_si512(p);
    const __m512bh weight[4] = {
        (__m512bh)_mm512_permutexvar_epi16(words, numbers),
        (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), numbers),
        (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), numbers),
        (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), numbers)};
    const __m512 scale = spread<F>(s + in_stretch / F::kColumns);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512bh v = (__m512bh)_mm512_loadu_si512(x[c] + k + i * kWidth);
        sum = _mm512_dpbf16_ps(sum, weight[i], v);
      }
      acc[c] = _mm512_fmadd_ps(scale, sum, acc[c]);
    }
  };

  for (int64_t stretch = 0; stretch < inputs; stretch += kStretch) {
    const int64_t end = least(inputs, stretch + kStretch);
    const int64_t count = (end - stretch) / F::kColumns;
    const uint8_t* from = scales + stretch / F::kColumns * F::kScaleBytes;
    for (int64_t i = 0; i < count; ++i) s[i] = F::widen_scale(from + i * F::kScaleBytes, factor);
    for (int64_t i = count; i < count + 8; ++i) s[i] = 0.0f;

    int64_t k = stretch;
    for (; k + kStep <= end; k += kStep) {
      __builtin_prefetch(w + k / 2 + prefetch_bytes, 0, 2);
      step(w + k / 2, k, k - stretch);
    }
    if (k < end) {
      uint8_t rest[kStep / 2] = {};
      memcpy(rest, w + k / 2, size_t(end - k) / 2);
      step(rest, k, k - stretch);
    }
  }
  for (int c = 0; c < C; ++c) out[c * out_stride] = _mm512_reduce_add_ps(acc[c]);
}

template <class F, int C>
void rows(const MatmulCall& call, int64_t row, int64_t end, int64_t token, int64_t tokens,
          bool from_memory) {
  if constexpr (C > 1) {
    if (tokens < C) return rows<F, C - 1>(call, row, end, token, tokens, from_memory);
  }
  const bf16* x[C];
  for (int c = 0; c < C; ++c) x[c] = static_cast<const bf16*>(call.x[token + c]);
  const int64_t number_bytes = call.inputs / 2;
  const int64_t scale_bytes = call.inputs / F::kColumns * F::kScaleBytes;
  for (; row < end; ++row) {
    const int64_t ahead = from_memory ? prefetch_after(call, row + 1, number_bytes) : 0;
    dot<F, C>(call.weight + row * number_bytes,
              call.matrix->scales + (call.first_row + row) * scale_bytes, call.matrix->factor,
              call.inputs, x, call.out + token * call.out_stride + row, call.out_stride, ahead);
  }
}

// As in scaled_kernels.h: rows in the order of their addresses, blocks of them for many tokens.
template <class F>
void matmul(const MatmulCall& call) {
  const int64_t block = call.tokens <= kRowTokens ? call.rows : 16;
  const int64_t tiles = (call.tokens + kRowTokens - 1) / kRowTokens;
  for (int64_t row = 0; row < call.rows; row += block) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t token = call.tokens * tile / tiles, next = call.tokens * (tile + 1) / tiles;
      rows<F, kRowTokens>(call, row, least(call.rows, row + block), token, next - token, tile == 0);
    }
  }
}

// Input 4 i + j of a step goes to word i of look-up j.
void pack(const void* x, int type, int64_t first, int64_t count, int64_t inputs, int, void* group) {
  bf16* to = static_cast<bf16*>(group);
  auto place = [&](int64_t k) -> bf16& {
    return to[k / kStep * kStep + k % 4 * kWidth + k % kStep / 4];
  };
  for (int64_t i = 0; i < count; ++i) {
    if (type == FTD_BF16) {
      place(first + i) = static_cast<const bf16*>(x)[i];
    } else {
      narrow(static_cast<const float*>(x)[i], place(first + i));
    }
  }
  if (first + count == inputs) {
    for (int64_t k = inputs; k < round_up(inputs, kStep); ++k) place(k) = {0};
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
