// 256-bit vectors: AVX2, FMA and F16C, on every x86-64 server and desktop since 2015.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

// After the includes, so that nothing of theirs is compiled for this processor.
#pragma GCC target("avx2,fma,f16c")

namespace ftd {
namespace {

// 12 of 16 registers hold partial sums
constexpr int kRowTokens = 3;
constexpr int kTileRows = 2, kTileTokens = 3, kTileTurns = 2;

struct Vec {
  static constexpr int kLanes = 8;
  __m256 v;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec all(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load(const bf16* p) {
    const __m256i wide =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static Vec load(const f16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(bf16* p) const {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  void store(f16* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
};

Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
Vec lower(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }  // b where one is NaN
Vec upper(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
Vec round_to_int(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
Vec power_of_two(Vec n) {
  const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 23))};
}
Vec kept(Vec a) {
  asm("" : "+x"(a.v));
  return a;
}
float first(Vec a) { return _mm256_cvtss_f32(a.v); }

float sum(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

void sum_eight(const Vec* a, float* out) {
  __m256 two[4], four[2];
  for (int i = 0; i < 4; ++i) {
    const __m256 x = a[2 * i].v, y = a[2 * i + 1].v;
    two[i] = _mm256_add_ps(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y));
  }
  for (int i = 0; i < 2; ++i) {
    const __m256d x = _mm256_castps_pd(two[2 * i]), y = _mm256_castps_pd(two[2 * i + 1]);
    four[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                            _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
  _mm256_storeu_ps(out, _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20),
                                      _mm256_permute2f128_ps(four[0], four[1], 0x31)));
}

float largest(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

template <class W>
constexpr bool kSplitsPairs = false;
template <>
constexpr bool kSplitsPairs<bf16> = true;  // a shift and a mask instead of two widenings

__m256i load_bits(const bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
Vec load_first(const bf16* p) { return {_mm256_castsi256_ps(_mm256_slli_epi32(load_bits(p), 16))}; }
Vec load_second(const bf16* p) {
  return {_mm256_castsi256_ps(_mm256_and_si256(load_bits(p), _mm256_set1_epi32(int(0xffff0000))))};
}
template <class W>
Vec load_first(const W* p) {
  return Vec::load(p);
}
template <class W>
Vec load_second(const W* p) {
  return Vec::load(p + Vec::kLanes);
}

// For scaled_kernels.h.

constexpr int kScaledTokens = 4;
constexpr float kFp8Unit = 256.0f;  // e4m3 bits as those of a float16: the bias is 15, not 7

struct Table {  // low and high bytes, in every 128 bits
  __m256i low, high;
  Table(const uint8_t* low_bytes, const uint8_t* high_bytes)
      : low(_mm256_broadcastsi128_si256(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(low_bytes)))),
        high(_mm256_broadcastsi128_si256(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(high_bytes)))) {}
};

void load_nibbles(const uint8_t* p, const Table& table, int u, Vec* w) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i codes[2] = {_mm256_and_si256(both, mask),
                            _mm256_and_si256(_mm256_srli_epi16(both, 4), mask)};
  for (int odd = 0; odd < 2; ++odd) {
    const __m256i low = _mm256_shuffle_epi8(table.low, codes[odd]);
    const __m256i high = _mm256_shuffle_epi8(table.high, codes[odd]);
    const __m256i words = u ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
    const __m256i upper = _mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000)));
    w[2 * odd] = {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16))};
    w[2 * odd + 1] = {_mm256_castsi256_ps(upper)};
  }
}

void load_fp8(const uint8_t* p, Vec* w) {
  for (int half = 0; half < 2; ++half) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * half));
    // the sign comes to bit 15 and, unwanted, to bit 14
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7),
                                          _mm256_set1_epi16(int16_t(0xbf80)));
    w[2 * half] = {_mm256_cvtph_ps(_mm256_castsi256_si128(bits))};
    w[2 * half + 1] = {_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
  }
}

template <int kStride>
Vec spread(const float* s) {
  return {_mm256_blend_ps(_mm256_broadcast_ss(s), _mm256_broadcast_ss(s + kStride), 0xf0)};
}

#include "vector_kernels.h"

}  // namespace

const Kernels* avx2_kernels() {
  static const Kernels kernels = vector_kernels();
  return &kernels;
}

}  // namespace ftd

#endif
