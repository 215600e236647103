// Instructions of AVX-512, AVX512-BF16 and AMX in plain C++, for machines that
// lack them: found before the compiler's own header, whose types it keeps.
// Slow, and right to the bit, but that bf16 products are added one by one and
// denormal numbers are not flushed.
#pragma once

#include_next <immintrin.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC diagnostic ignored                                                 \
    "-Wpsabi" // vectors of 512 bits are passed in memory here

namespace emulated {

template <class T, class V> struct Lanes {
  static constexpr int kCount = sizeof(V) / sizeof(T);
  T at[kCount];

  Lanes() : at{} {}
  Lanes(V v) { memcpy(at, &v, sizeof v); }
  operator V() const {
    V v;
    memcpy(&v, at, sizeof v);
    return v;
  }
};
using Floats = Lanes<float, __m512>;
template <class T> using Ints = Lanes<T, __m512i>;

template <class L, class F> L each(F &&f) {
  L out;
  for (int i = 0; i < L::kCount; ++i)
    out.at[i] = f(i);
  return out;
}

template <class To, class From>
To cast(From v) { // the lower lanes, or what is above unknown
  To to;
  memset(&to, 0x5a, sizeof to);
  memcpy(&to, &v, sizeof to < sizeof v ? sizeof to : sizeof v);
  return to;
}
template <class V> V load(const void *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> void store(void *p, V v) { memcpy(p, &v, sizeof v); }
template <class T, class V> V load_some(uint64_t mask, const void *p) {
  Lanes<T, V> out;
  for (int i = 0; i < out.kCount; ++i)
    if (mask >> i & 1)
      memcpy(&out.at[i], static_cast<const T *>(p) + i, sizeof(T));
  return out;
}
template <class T, class V> void store_some(void *p, uint64_t mask, V v) {
  const Lanes<T, V> in(v);
  for (int i = 0; i < in.kCount; ++i)
    if (mask >> i & 1)
      memcpy(static_cast<T *>(p) + i, &in.at[i], sizeof(T));
}
template <class T> __m512i all(T x) {
  return each<Ints<T>>([&](int) { return x; });
}
template <class V> V broadcast(const void *p, size_t bytes) {
  V v;
  for (size_t i = 0; i < sizeof v; i += bytes)
    memcpy(reinterpret_cast<char *>(&v) + i, p, bytes);
  return v;
}
template <class V> __m512i broadcast_of(V v) {
  return broadcast<__m512i>(&v, sizeof v);
}
template <class Part, class V> Part extract(V v, int i) {
  return load<Part>(reinterpret_cast<const char *>(&v) + i * sizeof(Part));
}

// Both of two vectors' lanes of 128 bits, from their lower or upper halves, in
// turns.
template <class T, class V> V unpack(V a, V b, bool high) {
  const Lanes<T, V> x(a), y(b);
  constexpr int kHalf = 8 / sizeof(T);
  return each<Lanes<T, V>>([&](int i) {
    const int from =
        i / (2 * kHalf) * 2 * kHalf + i % (2 * kHalf) / 2 + (high ? kHalf : 0);
    return i % 2 ? y.at[from] : x.at[from];
  });
}

inline float widen(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  memcpy(&x, &wide, sizeof x);
  return x;
}
inline uint16_t narrow(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return x != x ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline __m512 dpbf16(__m512 sum, __m512i a, __m512i b) {
  const Floats s(sum);
  const Ints<uint16_t> x(a), y(b);
  return each<Floats>([&](int i) {
    return s.at[i] + widen(x.at[2 * i]) * widen(y.at[2 * i]) +
           widen(x.at[2 * i + 1]) * widen(y.at[2 * i + 1]);
  });
}
inline void scatter(void *base, uint64_t mask, __m512i index, __m512i v,
                    int scale) {
  const Ints<int32_t> at(index), in(v);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1)
      memcpy(static_cast<char *>(base) + int64_t(at.at[i]) * scale, &in.at[i],
             4);
}

// ---- tiles
// ------------------------------------------------------------------------------------

struct Tile {
  int rows, bytes;
  uint8_t at[16][64];
};
inline thread_local Tile tiles[8] = {};

inline void check(bool good, const char *what) {
  if (good)
    return;
  fprintf(stderr, "tiles: %s\n", what);
  abort();
}
inline void configure(const void *config) {
  const uint8_t *c = static_cast<const uint8_t *>(config);
  check(c[0] == 1 && c[1] == 0, "palette and first row");
  for (int t = 0; t < 8; ++t) {
    uint16_t bytes;
    memcpy(&bytes, c + 16 + 2 * t, sizeof bytes);
    check(bytes <= 64 && c[48 + t] <= 16, "too large");
    tiles[t] = {c[48 + t], bytes, {}};
  }
}
inline void release() { memset(tiles, 0, sizeof tiles); }
inline Tile &used(int t) {
  check(tiles[t].rows > 0 && tiles[t].bytes > 0, "not configured");
  return tiles[t];
}
inline void zero(int t) { memset(used(t).at, 0, sizeof tiles[t].at); }
inline void load_tile(int t, const void *from, int64_t stride) {
  Tile &tile = used(t);
  for (int r = 0; r < tile.rows; ++r)
    memcpy(tile.at[r], static_cast<const char *>(from) + r * stride,
           size_t(tile.bytes));
}
inline void store_tile(int t, void *to, int64_t stride) {
  const Tile &tile = used(t);
  for (int r = 0; r < tile.rows; ++r)
    memcpy(static_cast<char *>(to) + r * stride, tile.at[r],
           size_t(tile.bytes));
}
inline void multiply(int c, int a, int b) {
  Tile &sums = used(c), &left = used(a), &right = used(b);
  check(sums.rows == left.rows && sums.bytes == right.bytes &&
            left.bytes == right.rows * 4,
        "shapes do not match");
  for (int m = 0; m < sums.rows; ++m) {
    for (int n = 0; n < sums.bytes / 4; ++n) {
      float sum;
      memcpy(&sum, sums.at[m] + 4 * n, sizeof sum);
      for (int k = 0; k < right.rows; ++k) {
        uint16_t x[2], y[2];
        memcpy(x, left.at[m] + 4 * k, sizeof x);
        memcpy(y, right.at[k] + 4 * n, sizeof y);
        sum += widen(x[0]) * widen(y[0]) + widen(x[1]) * widen(y[1]);
      }
      memcpy(sums.at[m] + 4 * n, &sum, sizeof sum);
    }
  }
}

// ---- vectors
// ----------------------------------------------------------------------------------

inline __m512 add_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each<Floats>([&](int i) { return x.at[i] + y.at[i]; });
}
inline __m512 mul_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each<Floats>([&](int i) { return x.at[i] * y.at[i]; });
}
inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  const Floats x(a), y(b), z(c);
  return each<Floats>(
      [&](int i) { return __builtin_fmaf(x.at[i], y.at[i], z.at[i]); });
}
inline float reduce_add_ps(__m512 a) {
  float sum = 0;
  for (float x : Floats(a).at)
    sum += x;
  return sum;
}
template <class T, class F> __m512i map(__m512i a, F &&f) {
  const Ints<T> x(a);
  return each<Ints<T>>([&](int i) { return T(f(x.at[i])); });
}
template <class T, class F> __m512i map(__m512i a, __m512i b, F &&f) {
  const Ints<T> x(a), y(b);
  return each<Ints<T>>([&](int i) { return T(f(x.at[i], y.at[i])); });
}
template <class T> uint64_t zero_lanes(__m512i a, __m512i b) {
  const Ints<T> x(a), y(b);
  uint64_t mask = 0;
  for (int i = 0; i < x.kCount; ++i)
    mask |= uint64_t((x.at[i] & y.at[i]) == 0) << i;
  return mask;
}
template <class T, class V> V choose(V otherwise, uint64_t mask, V v) {
  const Lanes<T, V> a(otherwise), b(v);
  return each<Lanes<T, V>>(
      [&](int i) { return mask >> i & 1 ? b.at[i] : a.at[i]; });
}
template <class T, class V> V permute(__m512i index, V from) {
  const Lanes<T, __m512i> at(index);
  const Lanes<T, V> in(from);
  return each<Lanes<T, V>>(
      [&](int i) { return in.at[at.at[i] & (in.kCount - 1)]; });
}
inline __m512 permute_floats(__m512i index, __m512 from) {
  const Ints<uint32_t> at(index);
  const Floats in(from);
  return each<Floats>([&](int i) { return in.at[at.at[i] & 15]; });
}
inline __m512i shuffle_bytes(__m512i a, __m512i b) {
  const Ints<uint8_t> x(a), y(b);
  return each<Ints<uint8_t>>([&](int i) {
    return y.at[i] & 0x80 ? uint8_t(0) : x.at[i / 16 * 16 + (y.at[i] & 15)];
  });
}
inline __m512i ternary(__m512i a, __m512i b, __m512i c, int table) {
  const Ints<uint64_t> x(a), y(b), z(c);
  return each<Ints<uint64_t>>([&](int i) {
    uint64_t out = 0;
    for (int bit = 0; bit < 64; ++bit) {
      const int row = (x.at[i] >> bit & 1) << 2 | (y.at[i] >> bit & 1) << 1 |
                      (z.at[i] >> bit & 1);
      out |= uint64_t(table >> row & 1) << bit;
    }
    return out;
  });
}
template <class To, class From, class V> __m512i widened(V v) {
  const Lanes<From, V> in(v);
  return each<Ints<To>>([&](int i) { return To(in.at[i]); });
}
inline __m512 from_halves(__m256i v) {
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(v));
  const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1));
  Floats out;
  memcpy(out.at, &low, sizeof low);
  memcpy(out.at + 8, &high, sizeof high);
  return out;
}
inline __m512i to_bf16(__m512 high, __m512 low) {
  const Floats x(low), y(high);
  return each<Ints<uint16_t>>(
      [&](int i) { return narrow(i < 16 ? x.at[i] : y.at[i - 16]); });
}
template <class Part> __m512i insert(__m512i v, Part part, int i) {
  memcpy(reinterpret_cast<char *>(&v) + sizeof part * i, &part, sizeof part);
  return v;
}
template <class... T> __m512i set_ints(T... v) {
  const int32_t in[16] = {v...};
  return load<__m512i>(in);
}

} // namespace emulated

// Where the compiler has macros, too, its own go.

#undef _mm512_setzero_ps
#define _mm512_setzero_ps() emulated::cast<__m512>(emulated::all(0))
#undef _mm512_setzero_si512
#define _mm512_setzero_si512() emulated::all(0)
#undef _mm512_set1_ps
#define _mm512_set1_ps(x)                                                      \
  emulated::each<emulated::Floats>([&](int) { return float(x); })              \
      .                                                                        \
      operator __m512()
#undef _mm512_set1_epi8
#define _mm512_set1_epi8(x) emulated::all(int8_t(x))
#undef _mm512_set1_epi16
#define _mm512_set1_epi16(x) emulated::all(int16_t(x))
#undef _mm512_set1_epi32
#define _mm512_set1_epi32(x) emulated::all(int32_t(x))
#undef _mm512_setr_epi32
#define _mm512_setr_epi32(...) emulated::set_ints(__VA_ARGS__)
#undef _mm512_loadu_si512
#define _mm512_loadu_si512(p) emulated::load<__m512i>(p)
#undef _mm512_loadu_ps
#define _mm512_loadu_ps(p) emulated::load<__m512>(p)
#undef _mm512_load_ps
#define _mm512_load_ps(p) emulated::load<__m512>(p)
#undef _mm512_store_si512
#define _mm512_store_si512(p, v) emulated::store(p, v)
#undef _mm512_store_ps
#define _mm512_store_ps(p, v) emulated::store(p, v)
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps(m, p) emulated::load_some<float, __m512>(m, p)
#undef _mm512_maskz_loadu_epi8
#define _mm512_maskz_loadu_epi8(m, p)                                          \
  emulated::load_some<uint8_t, __m512i>(m, p)
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16(m, p)                                         \
  emulated::load_some<uint16_t, __m512i>(m, p)
#undef _mm256_maskz_loadu_epi8
#define _mm256_maskz_loadu_epi8(m, p)                                          \
  emulated::load_some<uint8_t, __m256i>(m, p)
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16(m, p)                                         \
  emulated::load_some<uint16_t, __m256i>(m, p)
#undef _mm_maskz_loadu_epi8
#define _mm_maskz_loadu_epi8(m, p) emulated::load_some<uint8_t, __m128i>(m, p)
#undef _mm_mask_storeu_ps
#define _mm_mask_storeu_ps(p, m, v) emulated::store_some<float>(p, m, v)
#undef _mm512_castsi512_ps
#define _mm512_castsi512_ps(v) emulated::cast<__m512>(v)
#undef _mm512_castsi512_si256
#define _mm512_castsi512_si256(v) emulated::cast<__m256i>(v)
#undef _mm512_castsi512_si128
#define _mm512_castsi512_si128(v) emulated::cast<__m128i>(v)
#undef _mm512_castsi256_si512
#define _mm512_castsi256_si512(v) emulated::cast<__m512i>(v)
#undef _mm512_castsi128_si512
#define _mm512_castsi128_si512(v) emulated::cast<__m512i>(v)
#undef _mm512_castps512_ps128
#define _mm512_castps512_ps128(v) emulated::cast<__m128>(v)
#undef _mm512_broadcast_i32x4
#define _mm512_broadcast_i32x4(v) emulated::broadcast_of(v)
#undef _mm512_broadcast_i64x4
#define _mm512_broadcast_i64x4(v) emulated::broadcast_of(v)
#undef _mm512_extracti32x4_epi32
#define _mm512_extracti32x4_epi32(v, i) emulated::extract<__m128i>(v, i)
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64(v, i) emulated::extract<__m256i>(v, i)
#undef _mm512_extractf32x4_ps
#define _mm512_extractf32x4_ps(v, i) emulated::extract<__m128>(v, i)
#undef _mm512_inserti32x4
#define _mm512_inserti32x4(v, part, i) emulated::insert(v, part, i)
#undef _mm512_inserti64x4
#define _mm512_inserti64x4(v, part, i) emulated::insert(v, part, i)
#undef _mm512_unpacklo_epi8
#define _mm512_unpacklo_epi8(a, b) emulated::unpack<uint8_t>(a, b, false)
#undef _mm512_unpackhi_epi8
#define _mm512_unpackhi_epi8(a, b) emulated::unpack<uint8_t>(a, b, true)
#undef _mm512_unpacklo_epi16
#define _mm512_unpacklo_epi16(a, b) emulated::unpack<uint16_t>(a, b, false)
#undef _mm512_unpackhi_epi16
#define _mm512_unpackhi_epi16(a, b) emulated::unpack<uint16_t>(a, b, true)
#undef _mm512_unpacklo_epi32
#define _mm512_unpacklo_epi32(a, b) emulated::unpack<uint32_t>(a, b, false)
#undef _mm512_unpackhi_epi32
#define _mm512_unpackhi_epi32(a, b) emulated::unpack<uint32_t>(a, b, true)
#undef _mm512_add_ps
#define _mm512_add_ps(a, b) emulated::add_ps(a, b)
#undef _mm512_mul_ps
#define _mm512_mul_ps(a, b) emulated::mul_ps(a, b)
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps(a, b, c) emulated::fmadd_ps(a, b, c)
#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps(a) emulated::reduce_add_ps(a)
#undef _mm512_add_epi16
#define _mm512_add_epi16(a, b)                                                 \
  emulated::map<uint16_t>(a, b, [](int x, int y) { return x + y; })
#undef _mm512_add_epi32
#define _mm512_add_epi32(a, b)                                                 \
  emulated::map<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x + y; })
#undef _mm512_mullo_epi32
#define _mm512_mullo_epi32(a, b)                                               \
  emulated::map<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x * y; })
#undef _mm512_and_si512
#define _mm512_and_si512(a, b)                                                 \
  emulated::map<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x & y; })
#undef _mm512_or_si512
#define _mm512_or_si512(a, b)                                                  \
  emulated::map<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x | y; })
#undef _mm512_srlv_epi16
#define _mm512_srlv_epi16(a, b)                                                \
  emulated::map<uint16_t>(a, b, [](int x, int y) { return x >> y; })
#undef _mm512_slli_epi16
#define _mm512_slli_epi16(a, n)                                                \
  emulated::map<uint16_t>(a, [&](int x) { return x << (n); })
#undef _mm512_srli_epi16
#define _mm512_srli_epi16(a, n)                                                \
  emulated::map<uint16_t>(a, [&](int x) { return x >> (n); })
#undef _mm512_srai_epi16
#define _mm512_srai_epi16(a, n)                                                \
  emulated::map<int16_t>(a, [&](int x) { return x >> (n); })
#undef _mm512_slli_epi32
#define _mm512_slli_epi32(a, n)                                                \
  emulated::map<uint32_t>(a, [&](uint32_t x) { return x << (n); })
#undef _mm512_srli_epi32
#define _mm512_srli_epi32(a, n)                                                \
  emulated::map<uint32_t>(a, [&](uint32_t x) { return x >> (n); })
#undef _mm512_srai_epi32
#define _mm512_srai_epi32(a, n)                                                \
  emulated::map<int32_t>(a, [&](int32_t x) { return x >> (n); })
#undef _mm512_ternarylogic_epi32
#define _mm512_ternarylogic_epi32(a, b, c, t) emulated::ternary(a, b, c, t)
#undef _mm512_testn_epi8_mask
#define _mm512_testn_epi8_mask(a, b) emulated::zero_lanes<uint8_t>(a, b)
#undef _mm512_testn_epi16_mask
#define _mm512_testn_epi16_mask(a, b) emulated::zero_lanes<uint16_t>(a, b)
#undef _mm512_mask_mov_epi16
#define _mm512_mask_mov_epi16(a, m, b) emulated::choose<uint16_t>(a, m, b)
#undef _mm512_mask_mov_ps
#define _mm512_mask_mov_ps(a, m, b) emulated::choose<float>(a, m, b)
#undef _mm512_maskz_mov_epi32
#define _mm512_maskz_mov_epi32(m, b)                                           \
  emulated::choose<uint32_t>(emulated::all(0), m, b)
#undef _mm512_permutexvar_epi16
#define _mm512_permutexvar_epi16(at, v) emulated::permute<uint16_t>(at, v)
#undef _mm512_permutexvar_ps
#define _mm512_permutexvar_ps(at, v) emulated::permute_floats(at, v)
#undef _mm512_shuffle_epi8
#define _mm512_shuffle_epi8(a, b) emulated::shuffle_bytes(a, b)
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32(v) emulated::widened<uint32_t, uint8_t>(v)
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(v) emulated::widened<uint32_t, uint16_t>(v)
#undef _mm512_cvtepi8_epi16
#define _mm512_cvtepi8_epi16(v) emulated::widened<int16_t, int8_t>(v)
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(v) emulated::from_halves(v)
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh(a, b) emulated::to_bf16(a, b)
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(s, a, b)                                              \
  emulated::dpbf16(s, (__m512i)(a), (__m512i)(b))
#undef _mm512_i32scatter_epi32
#define _mm512_i32scatter_epi32(p, at, v, n)                                   \
  emulated::scatter(p, 0xffff, at, v, n)
#undef _mm512_mask_i32scatter_epi32
#define _mm512_mask_i32scatter_epi32(p, m, at, v, n)                           \
  emulated::scatter(p, m, at, v, n)
#undef _tile_loadconfig
#define _tile_loadconfig(p) emulated::configure(p)
#undef _tile_release
#define _tile_release() emulated::release()
#undef _tile_zero
#define _tile_zero(t) emulated::zero(t)
#undef _tile_loadd
#define _tile_loadd(t, p, stride) emulated::load_tile(t, p, stride)
#undef _tile_stored
#define _tile_stored(t, p, stride) emulated::store_tile(t, p, stride)
#undef _tile_dpbf16ps
#define _tile_dpbf16ps(c, a, b) emulated::multiply(c, a, b)
