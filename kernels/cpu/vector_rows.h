// Element by element, and row by row. Included by vector_kernels.h, within the namespace of
// each instruction set.

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
