// 512-bit vectors: AVX-512 F, BW, DQ and VL, on Intel servers since 2017 and on AMD since Zen 4.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

// After the includes, so that nothing of theirs is compiled for this processor.
#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12 warns of its own undefined vectors
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")

namespace ftd {
namespace {

// 24 of 32 registers hold partial sums
constexpr int kRowTokens = 6;
constexpr int kTileRows = 2, kTileTokens = 6, kTileTurns = 2;

struct Vec {
  static constexpr int kLanes = 16;
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec all(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const bf16* p) {
    const __m512i wide =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static Vec load(const f16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(bf16* p) const {
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(
        _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    r = _mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
  }
  void store(f16* p) const {
    const __m256i half = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
  }
};

Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
Vec lower(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }  // b where one is NaN
Vec upper(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
Vec round_to_int(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
Vec power_of_two(Vec n) {
  const __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 23))};
}
Vec kept(Vec a) {
  asm("" : "+v"(a.v));
  return a;
}
float first(Vec a) { return _mm512_cvtss_f32(a.v); }

float sum(Vec a) {
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

void sum_eight(const Vec* a, float* out) {
  __m256 one[8], two[4], four[2];
  for (int i = 0; i < 8; ++i)
    one[i] = _mm256_add_ps(_mm512_castps512_ps256(a[i].v), _mm512_extractf32x8_ps(a[i].v, 1));
  for (int i = 0; i < 4; ++i) {
    const __m256 x = one[2 * i], y = one[2 * i + 1];
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
  const __m256 y = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

template <class W>
constexpr bool kSplitsPairs = false;
template <>
constexpr bool kSplitsPairs<bf16> = true;  // a shift and a mask instead of two widenings

__m512i load_bits(const bf16* p) { return _mm512_loadu_si512(p); }
Vec load_first(const bf16* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(load_bits(p), 16))}; }
Vec load_second(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(load_bits(p), _mm512_set1_epi32(int(0xffff0000))))};
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

constexpr int kScaledTokens = 8;
constexpr float kFp8Unit = 256.0f;  // e4m3 bits as those of a float16: the bias is 15, not 7

struct Table {  // low and high bytes, in every 128 bits
  __m512i low, high;
  Table(const uint8_t* low_bytes, const uint8_t* high_bytes)
      : low(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low_bytes)))),
        high(
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(high_bytes)))) {
  }
};

void load_nibbles(const uint8_t* p, const Table& table, int u, Vec* w) {
  const __m512i both = _mm512_loadu_si512(p);
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i codes[2] = {_mm512_and_si512(both, mask),
                            _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
  for (int odd = 0; odd < 2; ++odd) {
    const __m512i low = _mm512_shuffle_epi8(table.low, codes[odd]);
    const __m512i high = _mm512_shuffle_epi8(table.high, codes[odd]);
    const __m512i words = u ? _mm512_unpackhi_epi8(low, high) : _mm512_unpacklo_epi8(low, high);
    const __m512i upper = _mm512_and_si512(words, _mm512_set1_epi32(int(0xffff0000)));
    w[2 * odd] = {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
    w[2 * odd + 1] = {_mm512_castsi512_ps(upper)};
  }
}

void load_fp8(const uint8_t* p, Vec* w) {
  for (int half = 0; half < 2; ++half) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * half));
    // the sign comes to bit 15 and, unwanted, to bit 14
    const __m512i bits = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7),
                                          _mm512_set1_epi16(int16_t(0xbf80)));
    w[2 * half] = {_mm512_cvtph_ps(_mm512_castsi512_si256(bits))};
    w[2 * half + 1] = {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))};
  }
}

template <int kStride>
Vec spread(const float* s) {
  const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, kStride, kStride, kStride, kStride,  //
                                          2 * kStride, 2 * kStride, 2 * kStride, 2 * kStride,
                                          3 * kStride, 3 * kStride, 3 * kStride, 3 * kStride);
  return {_mm512_permutexvar_ps(which, _mm512_castps256_ps512(_mm256_loadu_ps(s)))};
}

#include "vector_kernels.h"

}  // namespace

const Kernels* avx512_kernels() {
  static const Kernels kernels = vector_kernels();
  return &kernels;
}

}  // namespace ftd

#endif
