// AVX512-BF16: bf16 weights times bf16 activations, two exact products an addition, sums in
// float32.
//
// Formats with scales are in scaled_avx512bf16.cpp and fp8_avx512bf16.cpp, everything else is
// AVX-512's. The order of additions depends on the number of tokens; the unit flushes denormals.
// Zen 4, Cooper Lake, Sapphire Rapids and later.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12 warns of its own undefined vectors
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

namespace ftd {
namespace {

constexpr int kWidth = 32;  // numbers in a register
constexpr int kStep = 4 * kWidth;
constexpr int kRowTokens = 6;  // 24 of 32 registers hold partial sums
constexpr int kTileRows = 4, kTileTokens = 6;

__m512bh load(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

// R rows against C tokens with U partial sums each, the weights of a step read line by line.
template <int R, int C, int U>
void dot(const bf16* w, int64_t inputs, const bf16* const* x, float* out, int64_t out_stride,
         int64_t prefetch_bytes) {
  __m512 acc[R][C][U];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      for (int u = 0; u < U; ++u) acc[r][c][u] = _mm512_setzero_ps();

  auto step = [&](const bf16* p, int64_t stride, int64_t k) {
#pragma GCC unroll 4
    for (int i = 0; i < kStep / kWidth; ++i) {
      __m512bh weight[R];
      for (int r = 0; r < R; ++r) weight[r] = load(p + r * stride + i * kWidth);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const __m512bh v = load(x[c] + k + i * kWidth);
        for (int r = 0; r < R; ++r)
          acc[r][c][i % U] = _mm512_dpbf16_ps(acc[r][c][i % U], weight[r], v);
      }
    }
  };
  int64_t k = 0;
  for (; k + kStep <= inputs; k += kStep) {
    for (int r = 0; r < R; ++r)
      for (int line = 0; line < kStep * 2; line += 64)
        __builtin_prefetch(
            reinterpret_cast<const char*>(w + r * inputs + k) + prefetch_bytes + line, 0, 2);
    step(w + k, inputs, k);
  }
  if (k < inputs) {
    bf16 rest[R][kStep] = {};
    for (int r = 0; r < R; ++r)
      memcpy(rest[r], w + r * inputs + k, size_t(inputs - k) * sizeof(bf16));
    step(rest[0], kStep, k);
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      __m512 sum = acc[r][c][0];
      for (int u = 1; u < U; ++u) sum = _mm512_add_ps(sum, acc[r][c][u]);
      out[c * out_stride + r] = _mm512_reduce_add_ps(sum);
    }
  }
}

template <int R, int C, int U>
void dot_rows(const MatmulCall& call, int64_t row, int64_t end, int64_t token, bool from_memory) {
  const bf16* x[C];
  for (int c = 0; c < C; ++c) x[c] = static_cast<const bf16*>(call.x[token + c]);
  float* out = call.out + token * call.out_stride;
  const bf16* w = reinterpret_cast<const bf16*>(call.weight);
  for (; row + R <= end; row += R) {
    const int64_t ahead = from_memory ? prefetch_after(call, row, R, call.inputs * 2) : 0;
    dot<R, C, U>(w + row * call.inputs, call.inputs, x, out + row, call.out_stride, ahead);
  }
  for (; R > 1 && row < end; ++row)
    dot<1, C, U>(w + row * call.inputs, call.inputs, x, out + row, call.out_stride, 0);
}

template <int R, int C, int U>
void dot_tile(const MatmulCall& call, int64_t row, int64_t end, int64_t token, int64_t tokens,
              bool from_memory) {
  if constexpr (C > 1) {
    if (tokens < C) return dot_tile<R, C - 1, U>(call, row, end, token, tokens, from_memory);
  }
  dot_rows<R, C, U>(call, row, end, token, from_memory);
}

// As in vector_kernels.h: few tokens in the order of addresses, more in blocks of rows.
void matmul(const MatmulCall& call) {
  if (call.tokens <= kRowTokens) {
    return dot_tile<1, kRowTokens, 4>(call, 0, call.rows, 0, call.tokens, true);
  }
  constexpr int64_t kBlockRows = 16;
  const int64_t tiles = (call.tokens + kTileTokens - 1) / kTileTokens;
  for (int64_t row = 0; row < call.rows; row += kBlockRows) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t token = call.tokens * tile / tiles, next = call.tokens * (tile + 1) / tiles;
      dot_tile<kTileRows, kTileTokens, 1>(call, row, least(call.rows, row + kBlockRows), token,
                                          next - token, tile == 0);
    }
  }
}

void pack(const void* x, int type, int64_t first, int64_t count, int64_t inputs, int, void* group) {
  bf16* to = static_cast<bf16*>(group) + first;
  if (type == FTD_BF16) {
    memcpy(to, x, size_t(count) * sizeof(bf16));
  } else {
    for (int64_t i = 0; i < count; ++i) narrow(static_cast<const float*>(x)[i], to[i]);
  }
  if (first + count == inputs)
    memset(to + count, 0, size_t(round_up(inputs, kStep) - inputs) * sizeof(bf16));
}

constexpr Matmul kMatmul = {1, kStep, sizeof(bf16), pack, matmul, 1, 4};

}  // namespace

const Kernels* avx512bf16_kernels() {
  static const Kernels kernels = [] {
    Kernels k = *avx512_kernels();
    k.matmul[FTD_BF16][FTD_BF16] = &kMatmul;
    use_avx512bf16_scaled(k);
    use_avx512bf16_fp8(k);
    return k;
  }();
  return &kernels;
}

}  // namespace ftd

#endif
