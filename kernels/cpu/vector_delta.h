// The gated delta rule. Included by vector_kernels.h, within the namespace of each
// instruction set.

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
