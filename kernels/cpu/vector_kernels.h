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
    const int64_t ahead = from_memory ? prefetch_after(call, row + R, row_bytes) : 0;
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

#include "scaled_kernels.h"

// ---- element-wise and row-wise ----------------------------------------------------------------

template <class Act>
Vec rounded(Act*, Vec x) {  // to Act and back
  Act whole[Vec::kLanes];
  x.store(whole);
  return Vec::load(whole);
}

void gate_up(const float* gate, const float* up, float* h, int64_t count, int act,
             const FtdActivation& activation) {
  const Vec limit = Vec::all(activation.limit), floor = Vec::all(-activation.limit);
  const Vec alpha = Vec::all(activation.alpha), shift = Vec::all(activation.shift);
  auto activate = [&](Vec g, Vec u) {  // the order of operands hands a NaN on
    const Vec gated = silu(alpha * lower(limit, g)) / alpha;
    return gated * (lower(limit, upper(floor, u)) + shift);
  };
  with_type(act, [&](auto* t) {
    int64_t i = 0;
    for (; i + Vec::kLanes <= count; i += Vec::kLanes)
      rounded(t, activate(Vec::load(gate + i), Vec::load(up + i))).store(h + i);
    if (i < count) {
      const Vec y = activate(load_some(gate + i, count - i), load_some(up + i, count - i));
      store_some(rounded(t, y), h + i, count - i);
    }
  });
}

void silu_mul(const void* gate, const void* up, void* y, int64_t count, int act) {
  with_type(act, [&](auto* t) {
    const auto *g = at(gate, t), *u = at(up, t);
    auto* out = at(y, t);
    int64_t i = 0;
    for (; i + Vec::kLanes <= count; i += Vec::kLanes)
      (silu(Vec::load(g + i)) * Vec::load(u + i)).store(out + i);
    if (i < count)
      store_some(silu(load_some(g + i, count - i)) * load_some(u + i, count - i), out + i,
                 count - i);
  });
}

void widen_all(const void* x, int type, float* y, int64_t count) {
  with_type(type, [&](auto* t) {
    const auto* from = at(x, t);
    int64_t i = 0;
    for (; i + Vec::kLanes <= count; i += Vec::kLanes) Vec::load(from + i).store(y + i);
    if (i < count) store_some(load_some(from + i, count - i), y + i, count - i);
  });
}

void narrow_all(const float* x, const float* bias, void* y, int type, int64_t count) {
  with_type(type, [&](auto* t) {
    auto* to = at(y, t);
    int64_t i = 0;
    for (; i + Vec::kLanes <= count; i += Vec::kLanes) {
      const Vec v = Vec::load(x + i);
      (bias ? v + Vec::load(bias + i) : v).store(to + i);
    }
    if (i < count) {
      const Vec v = load_some(x + i, count - i);
      store_some(bias ? v + load_some(bias + i, count - i) : v, to + i, count - i);
    }
  });
}

void add_scaled(const float* x, float weight, float* y, int64_t count) {
  const Vec w = Vec::all(weight);
  int64_t i = 0;
  for (; i + Vec::kLanes <= count; i += Vec::kLanes)
    fma(w, Vec::load(x + i), Vec::load(y + i)).store(y + i);
  if (i < count) {
    store_some(fma(w, load_some(x + i, count - i), load_some(y + i, count - i)), y + i, count - i);
  }
}

void rms_norm(const void* x, int type, const float* weight, void* y, int out, int64_t width,
              float eps) {
  with_type(type, [&](auto* t) {
    const auto* from = at(x, t);
    Vec squares = Vec::zero();
    int64_t i = 0;
    for (; i + Vec::kLanes <= width; i += Vec::kLanes) {
      const Vec v = Vec::load(from + i);
      squares = fma(v, v, squares);
    }
    if (i < width) {
      const Vec v = load_some(from + i, width - i);
      squares = fma(v, v, squares);
    }
    const Vec scale = Vec::all(1.0f / __builtin_sqrtf(sum(squares) / float(width) + eps));
    with_type(out, [&](auto* o) {
      auto* to = at(y, o);
      int64_t j = 0;
      for (; j + Vec::kLanes <= width; j += Vec::kLanes)
        (Vec::load(from + j) * scale * Vec::load(weight + j)).store(to + j);
      if (j < width) {
        store_some(load_some(from + j, width - j) * scale * load_some(weight + j, width - j),
                   to + j, width - j);
      }
    });
  });
}

void rope(void* x, int act, const float* cos, const float* sin, int64_t half, int interleaved) {
  with_type(act, [&](auto* t) {
    auto* v = at(x, t);
    if (interleaved) {
      for (int64_t i = 0; i < half; ++i) {
        const float a = widen(v[2 * i]), b = widen(v[2 * i + 1]);
        narrow(a * cos[i] - b * sin[i], v[2 * i]);
        narrow(b * cos[i] + a * sin[i], v[2 * i + 1]);
      }
      return;
    }
    auto* w = v + half;
    for (int64_t i = 0; i < half; i += Vec::kLanes) {
      const int64_t n = least(Vec::kLanes, half - i);
      const bool whole = n == Vec::kLanes;
      const Vec a = whole ? Vec::load(v + i) : load_some(v + i, n);
      const Vec b = whole ? Vec::load(w + i) : load_some(w + i, n);
      const Vec c = whole ? Vec::load(cos + i) : load_some(cos + i, n);
      const Vec s = whole ? Vec::load(sin + i) : load_some(sin + i, n);
      const Vec first = a * c - b * s, second = b * c + a * s;
      if (whole) {
        first.store(v + i);
        second.store(w + i);
      } else {
        store_some(first, v + i, n);
        store_some(second, w + i, n);
      }
    }
  });
}

// ---- attention --------------------------------------------------------------------------------

constexpr int kHeadTile = 2;  // heads that share what was loaded

// Positions of a sequence, one after the other.
struct Cursor {
  const AttentionCall& call;
  int64_t page, offset;  // offset counts positions within the page

  Cursor(const AttentionCall& c, int64_t position)
      : call(c), page(position / c.page_tokens), offset(position % c.page_tokens) {}
  int64_t number() const {  // of the first channel, counted from page 0
    return (call.pages[page] * call.page_tokens + offset) * call.position_stride;
  }
  void next() {
    if (++offset == call.page_tokens) offset = 0, ++page;
  }
};

// Positions [begin, end) widened: stage[i] is position begin + i, Dp channels. Rows of one head are
// short and far apart, too little for the processor's own prefetching, so those to come are asked
// for.
void stage_positions(const AttentionCall& call, const void* pages, int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 12;
  const int64_t dim = call.head_dim, padded = round_up(dim, kHeadAlign);
  with_type(call.type, [&](auto* t) {
    Cursor here(call, begin), ahead(call, begin);
    for (int64_t p = begin - kAhead; p < end; ++p) {
      if (p + kAhead < end) {
        const char* row = reinterpret_cast<const char*>(at(pages, t, ahead.number()));
        for (int64_t byte = 0; byte < dim * int64_t(sizeof *t); byte += 64)
          __builtin_prefetch(row + byte);
        ahead.next();
      }
      if (p < begin) continue;
      const auto* from = at(pages, t, here.number());
      float* to = call.stage + (p - begin) * padded;
      int64_t d = 0;
      for (; d + Vec::kLanes <= dim; d += Vec::kLanes) Vec::load(from + d).store(to + d);
      if (d < dim) {
        load_some(from + d, dim - d).store(to + d);
        d += Vec::kLanes;
      }
      for (; d < padded; d += Vec::kLanes) Vec::zero().store(to + d);
      here.next();
    }
  });
}

// Scores of kKeyTile keys for two heads (the same one twice where only one is left): [head][key].
void score_tile(const float* q0, const float* q1, const float* k, int64_t padded, float scale,
                float* scores) {
  Vec acc[kHeadTile * kKeyTile];
  for (Vec& a : acc) a = Vec::zero();
  for (int64_t d = 0; d < padded; d += Vec::kLanes) {
    const Vec a = Vec::load(q0 + d), b = Vec::load(q1 + d);
#pragma GCC unroll 4
    for (int i = 0; i < kKeyTile; ++i) {
      const Vec key = kept(Vec::load(k + i * padded + d));
      acc[i] = fma(a, key, acc[i]);
      acc[kKeyTile + i] = fma(b, key, acc[kKeyTile + i]);
    }
  }
  sum_eight(acc, scores);
  for (int i = 0; i < kHeadTile * kKeyTile; ++i) scores[i] *= scale;
}

// acc[h] += Σ_p weight[h][p] · value[p] over positions in order, for N vectors of channels.
template <int N>
void value_tile(const float* p0, const float* p1, const float* v, int64_t count, int64_t padded,
                float* acc0, float* acc1) {
  Vec a[N], b[N];
  for (int i = 0; i < N; ++i) {
    a[i] = Vec::load(acc0 + i * Vec::kLanes);
    b[i] = Vec::load(acc1 + i * Vec::kLanes);
  }
  for (int64_t p = 0; p < count; ++p) {
    const Vec w0 = Vec::all(p0[p]), w1 = Vec::all(p1[p]);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const Vec value = kept(Vec::load(v + p * padded + i * Vec::kLanes));
      a[i] = fma(w0, value, a[i]);
      b[i] = fma(w1, value, b[i]);
    }
  }
  for (int i = 0; i < N; ++i) {
    a[i].store(acc0 + i * Vec::kLanes);
    b[i].store(acc1 + i * Vec::kLanes);
  }
}

// Scores of positions [begin, end), the first of which lies at stage.
void score_keys(const AttentionCall& call, const AttentionRow& row, int64_t begin, int64_t end,
                const float* stage) {
  const int64_t padded = round_up(call.head_dim, kHeadAlign);
  for (int64_t h = 0; h < call.heads; h += kHeadTile) {
    const int64_t g = least(h + 1, call.heads - 1);
    for (int64_t p = begin; p < end; p += kKeyTile) {
      float scores[kHeadTile *
                   kKeyTile];  // keys past the end are scored and dropped: the stage has room
      score_tile(row.q + h * padded, row.q + g * padded, stage + (p - begin) * padded, padded,
                 call.scale, scores);
      float* to = row.score + p - call.block;
      for (int64_t i = 0; i < least(kKeyTile, end - p); ++i) {
        to[h * kKeyBlock + i] = scores[i];
        to[g * kKeyBlock + i] = scores[kKeyTile + i];
      }
    }
  }
}

// Turns scores into weights e^(score - max). A position's lane is fixed by its place in the block.
void softmax_row(const AttentionCall& call, const AttentionRow& row) {
  const int64_t begin = row.begin - call.block, end = row.end - call.block;
  const int64_t first_lane = begin / Vec::kLanes * Vec::kLanes,
                last_lane = round_up(end, Vec::kLanes);
  for (int64_t h = 0; h < call.heads; ++h) {
    float* score = row.score + h * kKeyBlock;
    auto fill_outside = [&](float value) {
      for (int64_t p = first_lane; p < begin; ++p) score[p] = value;
      for (int64_t p = end; p < last_lane; ++p) score[p] = value;
    };
    fill_outside(-__builtin_inff());
    Vec most = Vec::all(-__builtin_inff());
    for (int64_t p = first_lane; p < last_lane; p += Vec::kLanes)
      most = upper(most, Vec::load(score + p));
    row.max[h] = largest(most);
    const Vec max = Vec::all(row.max[h]);
    for (int64_t p = first_lane; p < last_lane; p += Vec::kLanes)
      exponential(Vec::load(score + p) - max).store(score + p);
    fill_outside(0.0f);
    Vec total = Vec::zero();
    for (int64_t p = first_lane; p < last_lane; p += Vec::kLanes)
      total = total + Vec::load(score + p);
    row.sum[h] = sum(total);
  }
}

void add_values(const AttentionCall& call, const AttentionRow& row, int64_t begin, int64_t end,
                const float* stage) {
  const int64_t padded = round_up(call.head_dim, kHeadAlign);
  for (int64_t h = 0; h < call.heads; h += kHeadTile) {
    const int64_t g = least(h + 1, call.heads - 1);
    const float* p0 = row.score + h * kKeyBlock + begin - call.block;
    const float* p1 = row.score + g * kKeyBlock + begin - call.block;
    for (int64_t d = 0; d < padded;) {
      float *a0 = row.acc + h * padded + d, *a1 = row.acc + g * padded + d;
      const int64_t vectors = (padded - d) / Vec::kLanes;
      if (vectors >= 4) {
        value_tile<4>(p0, p1, stage + d, end - begin, padded, a0, a1);
        d += 4 * Vec::kLanes;
      } else {
        value_tile<1>(p0, p1, stage + d, end - begin, padded, a0, a1);
        d += Vec::kLanes;
      }
    }
  }
}

// One block of keys against rows of one sequence: each key and value is widened once for all of
// them.
void attend(const AttentionCall& call) {
  const int64_t padded = round_up(call.head_dim, kHeadAlign);
  int64_t first = call.rows[0].begin, last = call.rows[0].end;
  for (int64_t r = 1; r < call.num_rows; ++r) {
    first = least(first, call.rows[r].begin);
    last = greatest(last, call.rows[r].end);
  }
  auto each_stage = [&](const void* pages, auto&& use) {
    for (int64_t p = first; p < last; p += kKeyStage) {
      const int64_t end = least(p + kKeyStage, last);
      stage_positions(call, pages, p, end);
      for (int64_t r = 0; r < call.num_rows; ++r) {
        const AttentionRow& row = call.rows[r];
        const int64_t from = greatest(p, row.begin), to = least(end, row.end);
        if (from < to) use(call, row, from, to, call.stage + (from - p) * padded);
      }
    }
  };
  each_stage(call.k, score_keys);
  for (int64_t r = 0; r < call.num_rows; ++r) {
    const AttentionRow& row = call.rows[r];
    if (row.begin >= row.end) continue;
    softmax_row(call, row);
    for (int64_t i = 0; i < call.heads * padded; ++i) row.acc[i] = 0.0f;
  }
  each_stage(call.v, add_values);
}

void merge(float* max, float* sum, float* acc, const float* later_max, const float* later_sum,
           const float* later_acc, int64_t heads, int64_t padded) {
  for (int64_t h = 0; h < heads; ++h) {
    const float most = max[h] > later_max[h] ? max[h] : later_max[h];
    const float old_scale = exponential(max[h] - most),
                new_scale = exponential(later_max[h] - most);
    max[h] = most;
    sum[h] = sum[h] * old_scale + later_sum[h] * new_scale;
    const Vec a = Vec::all(old_scale), b = Vec::all(new_scale);
    for (int64_t d = h * padded; d < (h + 1) * padded; d += Vec::kLanes)
      fma(Vec::load(later_acc + d), b, Vec::load(acc + d) * a).store(acc + d);
  }
}

// ---- plain reading ----------------------------------------------------------------------------

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

// ---- the gated delta rule -----------------------------------------------------------------------

// Columns of a state do not meet, so each block of them goes through all rows by itself. Sums over
// key channels are made of the even and of the odd ones, in their order.
void delta(const DeltaScan& scan, int64_t head, int64_t column, float* stage) {
  constexpr int kVecs = kDeltaColumns / Vec::kLanes;
  const int64_t keys = scan.key_dim, width = scan.value_dim;
  const int64_t count = least(kDeltaColumns, width - column);
  const int64_t at = head * keys * width + column;
  for (int64_t i = 0; i < keys; ++i) {
    for (int64_t j = 0; j < kDeltaColumns; ++j)
      stage[i * kDeltaColumns + j] =
          scan.source && j < count ? scan.source[at + i * width + j] : 0.0f;
  }
  for (int64_t t = 0; t < scan.rows; ++t) {
    const int64_t row = t * scan.heads + head;
    const float* q = scan.q + row * keys;
    const float* k = scan.k + row * keys;
    const Vec decay = Vec::all(scan.decay[row]), beta = Vec::all(scan.beta[row]);
    Vec sum[2][kVecs];
    for (int j = 0; j < kVecs; ++j) sum[0][j] = sum[1][j] = Vec::zero();
    auto decayed = [&](int64_t i, Vec* into) {
      const Vec key = Vec::all(k[i]);
      for (int j = 0; j < kVecs; ++j) {
        float* s = stage + i * kDeltaColumns + j * Vec::kLanes;
        const Vec kept_state = Vec::load(s) * decay;
        kept_state.store(s);
        into[j] = fma(key, kept_state, into[j]);
      }
    };
    int64_t i = 0;
    for (; i + 2 <= keys; i += 2) {
      decayed(i, sum[0]);
      decayed(i + 1, sum[1]);
    }
    if (i < keys) decayed(i, sum[0]);

    Vec change[kVecs];
    const float* v = scan.v + row * width + column;
    for (int j = 0; j < kVecs; ++j) {
      const int64_t left = least(Vec::kLanes, count - j * Vec::kLanes);
      const Vec value = left == Vec::kLanes ? Vec::load(v + j * Vec::kLanes)
                        : left > 0          ? load_some(v + j * Vec::kLanes, left)
                                            : Vec::zero();
      change[j] = (value - (sum[0][j] + sum[1][j])) * beta;
      sum[0][j] = sum[1][j] = Vec::zero();
    }
    auto changed = [&](int64_t i, Vec* into) {
      const Vec key = Vec::all(k[i]), query = Vec::all(q[i]);
      for (int j = 0; j < kVecs; ++j) {
        float* s = stage + i * kDeltaColumns + j * Vec::kLanes;
        const Vec state = fma(key, change[j], Vec::load(s));
        state.store(s);
        into[j] = fma(query, state, into[j]);
      }
    };
    for (i = 0; i + 2 <= keys; i += 2) {
      changed(i, sum[0]);
      changed(i + 1, sum[1]);
    }
    if (i < keys) changed(i, sum[0]);
    float* out = scan.out + row * width + column;
    for (int j = 0; j < kVecs; ++j) {
      const int64_t left = least(Vec::kLanes, count - j * Vec::kLanes);
      const Vec result = sum[0][j] + sum[1][j];
      if (left == Vec::kLanes) {
        result.store(out + j * Vec::kLanes);
      } else if (left > 0) {
        store_some(result, out + j * Vec::kLanes, left);
      }
    }
  }
  for (int64_t i = 0; i < keys; ++i)
    for (int64_t j = 0; j < count; ++j)
      scan.target[at + i * width + j] = stage[i * kDeltaColumns + j];
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
