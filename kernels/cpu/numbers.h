// Two-byte floats as plain structs, with scalar conversions that round to nearest, ties to even.
#pragma once

#include <stdint.h>
#include <string.h>

namespace ftd {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

inline float widen(float x) { return x; }

inline float widen(bf16 x) { return float_of(uint32_t(x.bits) << 16); }

inline float widen(f16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
  const uint32_t rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // infinity, NaN
  // 2^112 moves the exponent from bias 15 to 127 and makes subnormals normal on the way
  return float_of(bits_of(float_of(rest << 13) * float_of(0x77800000)) | sign);
}

// What four bits stand for, as bf16. 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives:
constexpr uint16_t kFp4Bits[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                   0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
// -8 .. 7:
constexpr uint16_t kInt4Bits[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

// A power of two.
inline float widen_e8m0(uint8_t x) { return float_of(uint32_t(x) << 23); }

// e4m3: a sign, four bits of exponent, three of mantissa.
inline float widen_e4m3(uint8_t x) {
  // 2^120 moves the exponent from bias 7 to 127 and makes subnormals normal on the way
  const float size = float_of(uint32_t(x & 0x7f) << 20) * float_of(0x7b800000);
  return float_of(bits_of(size) | uint32_t(x & 0x80) << 24);
}

inline void narrow(float x, float& y) { y = x; }

inline void narrow(float x, bf16& y) {
  const uint32_t u = bits_of(x);
  const bool nan = (u & 0x7fffffff) > 0x7f800000;
  y.bits = nan ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline void narrow(float x, f16& y) {
  const uint32_t u = bits_of(x);
  const uint16_t sign = uint16_t(u >> 16 & 0x8000);
  const uint32_t rest = u & 0x7fffffff;
  if (rest > 0x7f800000) {
    y.bits = sign | 0x7e00;
  } else if (rest >= 0x477ff000) {  // rounds past 65504
    y.bits = sign | 0x7c00;
  } else if (rest < 0x38800000) {  // subnormal: the sum's own rounding does the work
    y.bits = sign | uint16_t(bits_of(float_of(rest) + 0.5f) - 0x3f000000);
  } else {
    y.bits = sign | uint16_t((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13);
  }
}

}  // namespace ftd
