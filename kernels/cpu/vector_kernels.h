// The kernels, written once over a vector type. Included by each isa_*.cpp inside its own unnamed
// namespace, after it has chosen its instructions and defined
//   Vec                    kLanes floats: zero(), all(x), load(p), store(p) for every number type
//   + - * /, fma, lower, upper, round_to_int, power_of_two; sum, largest, first over lanes
//   sum_eight(a, out)      the sums over lanes of eight vectors, each by one and the same tree
//   kept(a)                a, in a register: the compiler would load it anew for each use
//   load_first(p), load_second(p)   2 · kLanes weights in two vectors
//   kSplitsPairs<W>        whether they are the even and the odd ones, else the two halves
//   Table, load_nibbles, load_fp8, kFp8Unit, spread, kScaledTokens   see scaled_kernels.h
//   kRowTokens             tokens of one row whose partial sums fit the registers
//   kTileRows, kTileTokens, kTileTurns   the same for a block of rows and tokens: see dot
//
// No include guard, and no function of the standard library: an inline one compiled here for a
// newer processor could be the copy that the linker keeps for everybody.

constexpr int kPairs = 2;                        // pairs of vectors a step: four partial sums
constexpr int kStep = kPairs * 2 * Vec::kLanes;  // inputs a step

template <class T>
Vec load_some(const T* p, int64_t count) {  // the rest of the lanes are zero
  T whole[Vec::kLanes] = {};
  for (int64_t i = 0; i < count; ++i) whole[i] = p[i];
  return Vec::load(whole);
}

template <class T>
void store_some(Vec x, T* p, int64_t count) {
  T whole[Vec::kLanes];
  x.store(whole);
  for (int64_t i = 0; i < count; ++i) p[i] = whole[i];
}

// Calls f(T*) with the pointer type of a code.
template <class F>
void with_type(int type, F&& f) {
  switch (type) {
    case FTD_BF16: return f(static_cast<bf16*>(nullptr));
    case FTD_F16: return f(static_cast<f16*>(nullptr));
    default: return f(static_cast<float*>(nullptr));
  }
}

template <class T>
const T* at(const void* p, T*, int64_t i = 0) {
  return static_cast<const T*>(p) + i;
}
template <class T>
T* at(void* p, T*, int64_t i = 0) {
  return static_cast<T*>(p) + i;
}

// e^x to about 1 unit in the last place; 0 below -87.3, NaN stays NaN.
Vec exponential(Vec x) {
  const Vec low = Vec::all(-87.33654f), high = Vec::all(88.37626f);
  // this operand order hands a NaN on
  x = lower(high, upper(low, x));
  const Vec n = round_to_int(x * Vec::all(1.44269504f));
  Vec r = fma(n, Vec::all(-0.693359375f), x);
  r = fma(n, Vec::all(2.12194440e-4f), r);
  Vec p = Vec::all(1.9875691500e-4f);
  p = fma(p, r, Vec::all(1.3981999507e-3f));
  p = fma(p, r, Vec::all(8.3334519073e-3f));
  p = fma(p, r, Vec::all(4.1665795894e-2f));
  p = fma(p, r, Vec::all(1.6666665459e-1f));
  p = fma(p, r, Vec::all(5.0000001201e-1f));
  p = fma(p, r * r, r + Vec::all(1.0f));
  return p * power_of_two(n);
}

float exponential(float x) { return first(exponential(Vec::all(x))); }

Vec silu(Vec x) {
  x = upper(Vec::all(-88.0f), x);  // below, the exponential no longer grows with it
  return x / (Vec::all(1.0f) + exponential(Vec::zero() - x));
}

// ---- matrix times tokens ----------------------------------------------------------------------

// R weight rows against C tokens, in the order that kernels.h promises. Where the registers do not
// hold four partial sums for each, the pairs of vectors of a step take turns: so many passes.
template <class W, int R, int C, int kTurns>
void dot(const W* w, int64_t inputs, const float* const* x, float* out, int64_t out_stride,
         int64_t prefetch_bytes) {
  constexpr int kHere = kPairs / kTurns;  // pairs in one turn
  Vec total[R][C];
  W rest[R][kStep];  // the end of each row, followed by zeros
  const int64_t whole = inputs / kStep * kStep;
  if (whole < inputs) {
    for (int r = 0; r < R; ++r)
      for (int64_t k = whole; k < whole + kStep; ++k)
        rest[r][k - whole] = k < inputs ? w[r * inputs + k] : W{};
  }

#pragma GCC unroll 2
  for (int turn = 0; turn < kTurns; ++turn) {
    Vec acc[R][C][2 * kHere];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c)
        for (int i = 0; i < 2 * kHere; ++i) acc[r][c][i] = Vec::zero();

    auto step = [&](const W* p, int64_t stride, int64_t k) {
#pragma GCC unroll 2
      for (int i = 0; i < kHere; ++i) {
        const int64_t at = (turn * kHere + i) * 2 * Vec::kLanes;
        Vec a[R];
        for (int r = 0; r < R; ++r) a[r] = load_first(p + r * stride + at);
        for (int c = 0; c < C; ++c) {
          const Vec u = kept(Vec::load(x[c] + k + at));
          for (int r = 0; r < R; ++r) acc[r][c][2 * i] = fma(a[r], u, acc[r][c][2 * i]);
        }
        for (int r = 0; r < R; ++r) a[r] = load_second(p + r * stride + at);
        for (int c = 0; c < C; ++c) {
          const Vec u = kept(Vec::load(x[c] + k + at + Vec::kLanes));
          for (int r = 0; r < R; ++r) acc[r][c][2 * i + 1] = fma(a[r], u, acc[r][c][2 * i + 1]);
        }
      }
    };
    for (int64_t k = 0; k < whole; k += kStep) {
      for (int r = 0; r < R && turn == 0; ++r)
        for (int64_t line = 0; line < int64_t(kStep * sizeof(W)); line += 64)
          __builtin_prefetch(
              reinterpret_cast<const char*>(w + r * inputs + k) + prefetch_bytes + line, 0, 2);
      step(w + k, inputs, k);
    }
    if (whole < inputs) step(rest[0], kStep, whole);

    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) {
        Vec sum = acc[r][c][0] + acc[r][c][1];
        for (int i = 1; i < kHere; ++i) sum = sum + (acc[r][c][2 * i] + acc[r][c][2 * i + 1]);
        total[r][c] = turn ? total[r][c] + sum : sum;
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) out[c * out_stride + r] = sum(total[r][c]);
}

template <class W, int R, int C, int kTurns>
void dot_rows(const MatmulCall& call, int64_t row, int64_t end, int64_t token, bool from_memory) {
  const float* x[C];
  for (int c = 0; c < C; ++c) x[c] = static_cast<const float*>(call.x[token + c]);
  float* out = call.out + token * call.out_stride;
  const W* w = reinterpret_cast<const W*>(call.weight);
  const int64_t row_bytes = call.inputs * int64_t(sizeof(W));
  for (; row + R <= end; row += R) {
    const int64_t ahead = from_memory ? prefetch_after(call, row, R, row_bytes) : 0;
    dot<W, R, C, kTurns>(w + row * call.inputs, call.inputs, x, out + row, call.out_stride, ahead);
  }
  for (; R > 1 && row < end; ++row)
    dot<W, 1, C, kTurns>(w + row * call.inputs, call.inputs, x, out + row, call.out_stride, 0);
}

// Calls dot_rows for 1 <= tokens <= C.
template <class W, int R, int C, int kTurns>
void dot_tile(const MatmulCall& call, int64_t row, int64_t end, int64_t token, int64_t tokens,
              bool from_memory) {
  if constexpr (C > 1) {
    if (tokens < C)
      return dot_tile<W, R, C - 1, kTurns>(call, row, end, token, tokens, from_memory);
  }
  dot_rows<W, R, C, kTurns>(call, row, end, token, from_memory);
}

// Few tokens: row after row, in the order of their addresses, which memory likes best. More: a
// block of rows stays in the cache while the tokens pass, a few rows at a time.
template <class W>
void matmul(const MatmulCall& call) {
  if (call.tokens <= kRowTokens) {
    return dot_tile<W, 1, kRowTokens, 1>(call, 0, call.rows, 0, call.tokens, true);
  }
  constexpr int64_t kBlockRows = 16;
  const int64_t tiles = (call.tokens + kTileTokens - 1) / kTileTokens;
  for (int64_t row = 0; row < call.rows; row += kBlockRows) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t token = call.tokens * tile / tiles, next = call.tokens * (tile + 1) / tiles;
      dot_tile<W, kTileRows, kTileTokens, kTileTurns>(call, row, least(call.rows, row + kBlockRows),
                                                      token, next - token, tile == 0);
    }
  }
}

// Inputs in the order in which load_first and load_second hand out weights.
template <class W>
void pack(const void* x, int type, int64_t first, int64_t count, int64_t inputs, int, void* group) {
  float* to = static_cast<float*>(group);
  with_type(type, [&](auto* t) {
    const auto* from = at(x, t);
    const int64_t end = first + count == inputs ? round_up(inputs, kStep) : first + count;
    for (int64_t k = first; k < end; k += 2 * Vec::kLanes) {
      float in[2 * Vec::kLanes] = {};
      const int64_t have = greatest(0, least(2 * Vec::kLanes, first + count - k));
      for (int64_t i = 0; i < have; ++i) in[i] = widen(from[k - first + i]);
      if constexpr (kSplitsPairs<W>) {
        for (int i = 0; i < Vec::kLanes; ++i) {
          to[k + i] = in[2 * i];
          to[k + Vec::kLanes + i] = in[2 * i + 1];
        }
      } else {
        for (int i = 0; i < 2 * Vec::kLanes; ++i) to[k + i] = in[i];
      }
    }
  });
}

template <class W>
constexpr Matmul kMatmul = {1, kStep, sizeof(float), pack<W>, matmul<W>};

// ---- everything else --------------------------------------------------------------------------

#include "scaled_kernels.h"
#include "vector_attention.h"
#include "vector_delta.h"
#include "vector_rows.h"

int64_t read_all(const void* data, int64_t bytes) {
  typedef int64_t Words __attribute__((vector_size(Vec::kLanes * 4), may_alias, aligned(8)));
  const Words* p = static_cast<const Words*>(data);
  Words a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; (i + 4) * int64_t(sizeof(Words)) <= bytes; i += 4) {
    a ^= p[i];
    b ^= p[i + 1];
    c ^= p[i + 2];
    d ^= p[i + 3];
  }
  const Words all = a ^ b ^ c ^ d;
  int64_t check = 0;
  for (int w = 0; w < Vec::kLanes / 2; ++w) check ^= all[w];
  return check;
}

Kernels vector_kernels() {
  Kernels k = {};
  for (int act = 0; act < kTypes; ++act) {
    k.matmul[FTD_BF16][act] = &kMatmul<bf16>;
    k.matmul[FTD_F16][act] = &kMatmul<f16>;
    k.matmul[FTD_F32][act] = &kMatmul<float>;
    k.matmul[FTD_FP8][act] = &kScaledMatmul<Fp8<128>>;
    k.matmul[FTD_FP8_ROW][act] = &kScaledMatmul<Fp8<0>>;
    k.matmul[FTD_MXFP4][act] = &kScaledMatmul<Mxfp4>;
    k.matmul[FTD_NVFP4][act] = &kScaledMatmul<Nvfp4>;
    k.matmul[FTD_INT4][act] = &kScaledMatmul<Int4>;
  }
  k.gate_up = gate_up;
  k.silu_mul = silu_mul;
  k.widen = widen_all;
  k.narrow = narrow_all;
  k.add_scaled = add_scaled;
  k.rms_norm = rms_norm;
  k.rope = rope;
  k.attend = attend;
  k.merge = merge;
  k.delta = delta;
  k.read = read_all;
  return k;
}
