// Plain C++ for every processor: arrays of eight floats that the compiler vectorises as it can.
#include <math.h>

#include "kernels.h"

namespace ftd {
namespace {

constexpr int kRowTokens = 1;
constexpr int kTileRows = 1, kTileTokens = 1, kTileTurns = 1;

struct Vec {
  static constexpr int kLanes = 8;
  float v[kLanes];

  static Vec zero() { return {}; }
  static Vec all(float x) { return {{x, x, x, x, x, x, x, x}}; }
  template <class T>
  static Vec load(const T* p) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = widen(p[i]);
    return r;
  }
  template <class T>
  void store(T* p) const {
    for (int i = 0; i < kLanes; ++i) narrow(v[i], p[i]);
  }
};

template <class F>
Vec each(F f) {
  Vec r;
  for (int i = 0; i < Vec::kLanes; ++i) r.v[i] = f(i);
  return r;
}

Vec operator+(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
Vec operator-(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
Vec operator*(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
Vec operator/(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
Vec lower(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
Vec upper(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
Vec round_to_int(const Vec& a) {
  return each([&](int i) { return nearbyintf(a.v[i]); });
}
Vec power_of_two(const Vec& n) {
  // a NaN makes the other factor NaN already; its conversion would be undefined
  return each([&](int i) {
    return n.v[i] == n.v[i] ? float_of(uint32_t(int(n.v[i]) + 127) << 23) : n.v[i];
  });
}
Vec kept(const Vec& a) { return a; }
float first(const Vec& a) { return a.v[0]; }
float sum(const Vec& a) {
  return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
void sum_eight(const Vec* a, float* out) {
  for (int i = 0; i < 8; ++i) out[i] = sum(a[i]);
}
float largest(const Vec& a) {
  float x = a.v[0];
  for (int i = 1; i < Vec::kLanes; ++i) x = a.v[i] > x ? a.v[i] : x;
  return x;
}

template <class W>
constexpr bool kSplitsPairs = false;

template <class W>
Vec load_first(const W* p) {
  return Vec::load(p);
}
template <class W>
Vec load_second(const W* p) {
  return Vec::load(p + Vec::kLanes);
}

// For scaled_kernels.h.

constexpr int kScaledTokens = 1;
constexpr float kFp8Unit = 1.0f;

struct Table {
  float value[16];
  Table(const uint8_t* low, const uint8_t* high) {
    for (int i = 0; i < 16; ++i) value[i] = float_of(uint32_t(high[i]) << 24 | low[i] << 16);
  }
};

void load_nibbles(const uint8_t* p, const Table& table, int u, Vec* w) {
  for (int i = 0; i < 4; ++i) {  // as place_nibbles has it
    for (int lane = 0; lane < Vec::kLanes; ++lane) {
      const uint8_t byte = p[lane / 4 * 16 + 8 * u + lane % 4 * 2 + i % 2];
      w[i].v[lane] = table.value[i / 2 ? byte >> 4 : byte & 15];
    }
  }
}

struct E4m3Values {
  float value[256] = {};
  constexpr E4m3Values() {
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15;
      float size = exponent ? float(8 + i % 8) : float(i % 8);
      for (int e = exponent ? exponent : 1; e < 10; ++e) size /= 2;
      for (int e = 10; e < exponent; ++e) size *= 2;
      value[i] = i < 128 ? size : -size;
    }
  }
};
constexpr E4m3Values kE4m3;

void load_fp8(const uint8_t* p, Vec* w) {
  for (int i = 0; i < 4 * Vec::kLanes; ++i)
    w[i / Vec::kLanes].v[i % Vec::kLanes] = kE4m3.value[p[i]];
}

template <int kStride>
Vec spread(const float* s) {
  return each([&](int i) { return s[i / 4 * kStride]; });
}

#include "vector_kernels.h"

}  // namespace

const Kernels* portable_kernels() {
  static const Kernels kernels = vector_kernels();
  return &kernels;
}

}  // namespace ftd
