// Attention over blocks of keys. Included by vector_kernels.h, within the namespace of each
// instruction set.

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
