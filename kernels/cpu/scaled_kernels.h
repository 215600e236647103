// Matrix times tokens for formats with scales. Included by vector_kernels.h, within the namespace
// of each instruction set, which has defined
//   Table                  16 numbers by their codes, of the bytes of a Codes
//   load_nibbles(p, table, u, w)   of 4 · kLanes bytes with two codes each, the even input's in the
//                          low four bits, the four vectors of half u: see place_nibbles
//   load_fp8(p, w)         4 · kLanes e4m3 numbers as four vectors, in their order, each divided by
//   kFp8Unit               this power of two
//   spread<kStride>(s)     kLanes / 4 scales, every kStride-th from s, each for four lanes
//   kScaledTokens          tokens of one row whose partial sums fit the registers
//
// Order of additions. A step of inputs is one or two parts of four vectors, a part has one vector
// of scales. A part is added up by itself from its first vector on, then goes, times the scales,
// into the one vector of sums; at the end its lanes are added by the tree of sum. So a result does
// not depend on the number of tokens, and four products are scaled at once instead of each weight.
// Rows end with zeros up to a whole step.

constexpr int kPartVecs = 4;
constexpr int kPart = kPartVecs * Vec::kLanes;  // inputs of a part
constexpr int kScaleStretch = 4096;             // inputs whose scales are widened at a time
constexpr int kScaleRoom = kScaleStretch / 16 + 2 * Vec::kLanes;  // what spread reads past the last

// Puts 32 inputs of a token where the vectors of their step find them. A 128-bit lane of a load
// holds the codes of 32 inputs, and unpacking bytes to words, words to floats leaves each in its
// lane: four floats of every vector.
inline void place_nibbles(const float* in, float* step, int64_t lane) {
  float* to = step + 4 * lane;
  for (int half = 0; half < 2; ++half)
    for (int high = 0; high < 2; ++high)  // four bits of a byte
      for (int odd = 0; odd < 2; ++odd)   // byte of a word
        for (int word = 0; word < 4; ++word)
          to[half * kPart + (2 * high + odd) * Vec::kLanes + word] =
              in[2 * (8 * half + 2 * word + odd) + high];
}

// What a code of four bits stands for, in the two bytes of a bf16.
struct Codes {
  uint8_t low[16], high[16];
};
constexpr Codes codes_of(const uint16_t (&bits)[16]) {
  Codes codes = {};
  for (int i = 0; i < 16; ++i) {
    codes.low[i] = uint8_t(bits[i]);
    codes.high[i] = uint8_t(bits[i] >> 8);
  }
  return codes;
}
constexpr Codes kFp4Codes = codes_of(kFp4Bits), kInt4Codes = codes_of(kInt4Bits);

// Numbers of four bits, two parts a step: the first and the last 16 inputs of every 32.
template <const Codes& kCodes, int kColumns>  // inputs that share a scale
struct FourBits {
  static constexpr int kParts = 2;
  static constexpr int kInputs = kParts * kPart;
  static constexpr int kBytes = kInputs / 2;
  static constexpr int kRows = 1;  // rows that share a scale

  Table table = Table(kCodes.low, kCodes.high);

  void part(const uint8_t* p, int u, Vec* w) const { load_nibbles(p, table, u, w); }

  static void place(const float* in, float* x, int64_t k) {
    place_nibbles(in, x + k / kInputs * kInputs, k % kInputs / 32);
  }
  static int64_t num_scales(int64_t inputs) { return inputs / kColumns; }
  // of a part of the step at input k of a stretch, whose scales are s
  static Vec scale(const float* s, int64_t k, int part) {
    if constexpr (kColumns == 16) return spread<2>(s + k / 16 + part);
    return spread<1>(s + k / 32);
  }
};

struct Mxfp4 : FourBits<kFp4Codes, 32> {
  static constexpr int kScaleBytes = 1;
  static float widen_scale(const uint8_t* p, float) { return widen_e8m0(*p); }
};

struct Nvfp4 : FourBits<kFp4Codes, 16> {
  static constexpr int kScaleBytes = 1;
  static float widen_scale(const uint8_t* p, float factor) { return widen_e4m3(*p) * factor; }
};

struct Int4 : FourBits<kInt4Codes, 32> {
  static constexpr int kScaleBytes = 2;
  static float widen_scale(const uint8_t* p, float) {
    return widen(*reinterpret_cast<const bf16*>(p));
  }
};

template <int kColumns>  // inputs that share a scale: 0: a whole row
struct Fp8 {
  static constexpr int kParts = 1;
  static constexpr int kInputs = kPart;
  static constexpr int kBytes = kInputs;
  static constexpr int kRows = kColumns ? 128 : 1;
  static constexpr int kScaleBytes = 4;

  static void part(const uint8_t* p, int, Vec* w) { load_fp8(p, w); }

  static void place(const float* in, float* x, int64_t k) { memcpy(x + k, in, 32 * sizeof *in); }
  static int64_t num_scales(int64_t inputs) {
    return kColumns ? (inputs + kColumns - 1) / kColumns : 1;
  }
  static float widen_scale(const uint8_t* p, float) {
    return *reinterpret_cast<const float*>(p) * kFp8Unit;
  }
  static Vec scale(const float* s, int64_t k, int) {
    return Vec::all(s[kColumns ? k / kColumns : 0]);
  }
};

// One weight row against C tokens.
template <class F, int C>
void scaled_dot(const uint8_t* w, const uint8_t* scales, float factor, int64_t inputs,
                const float* const* x, float* out, int64_t out_stride, int64_t prefetch_bytes) {
  Vec acc[C];
  for (int c = 0; c < C; ++c) acc[c] = Vec::zero();
  const F format = {};
  float s[kScaleRoom];
  const int64_t all = F::num_scales(inputs);

  auto step = [&](const uint8_t* p, int64_t k, int64_t in_stretch) {
#pragma GCC unroll 2
    for (int u = 0; u < F::kParts; ++u) {
      Vec weight[kPartVecs];
      format.part(p, u, weight);
      const Vec scale = F::scale(s, in_stretch, u);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const float* from = x[c] + k + u * kPart;
        Vec sum = weight[0] * Vec::load(from);
#pragma GCC unroll 4
        for (int i = 1; i < kPartVecs; ++i)
          sum = fma(weight[i], Vec::load(from + i * Vec::kLanes), sum);
        acc[c] = fma(scale, sum, acc[c]);
      }
    }
  };

  for (int64_t stretch = 0; stretch < inputs; stretch += kScaleStretch) {
    const int64_t end = least(inputs, stretch + kScaleStretch), first = F::num_scales(stretch);
    const int64_t count = all == 1 ? 1 : F::num_scales(end) - first;
    const uint8_t* from = all == 1 ? scales : scales + first * F::kScaleBytes;
    for (int64_t i = 0; i < count; ++i) s[i] = F::widen_scale(from + i * F::kScaleBytes, factor);
    for (int64_t i = count; i < count + 2 * Vec::kLanes; ++i) s[i] = 0.0f;

    int64_t k = stretch;
    for (; k + F::kInputs <= end; k += F::kInputs) {
      const uint8_t* p = w + k / F::kInputs * F::kBytes;
      __builtin_prefetch(p + prefetch_bytes, 0, 2);
      step(p, k, k - stretch);
    }
    if (k < end) {
      uint8_t rest[F::kBytes] = {};
      memcpy(rest, w + k / F::kInputs * F::kBytes, size_t((end - k) * F::kBytes / F::kInputs));
      step(rest, k, k - stretch);
    }
  }
  for (int c = 0; c < C; ++c) out[c * out_stride] = sum(acc[c]);
}

template <class F, int C>
void scaled_rows(const MatmulCall& call, int64_t row, int64_t end, int64_t token, int64_t tokens,
                 bool from_memory) {
  if constexpr (C > 1) {
    if (tokens < C) return scaled_rows<F, C - 1>(call, row, end, token, tokens, from_memory);
  }
  const float* x[C];
  for (int c = 0; c < C; ++c) x[c] = static_cast<const float*>(call.x[token + c]);
  const int64_t number_bytes =
      call.inputs / F::kInputs * F::kBytes + call.inputs % F::kInputs * F::kBytes / F::kInputs;
  const int64_t scale_bytes = F::num_scales(call.inputs) * F::kScaleBytes;
  for (; row < end; ++row) {
    const int64_t ahead = from_memory ? prefetch_after(call, row, 1, number_bytes) : 0;
    const uint8_t* scales = call.matrix->scales + (call.first_row + row) / F::kRows * scale_bytes;
    scaled_dot<F, C>(call.weight + row * number_bytes, scales, call.matrix->factor, call.inputs, x,
                     call.out + token * call.out_stride + row, call.out_stride, ahead);
  }
}

// As matmul: rows in the order of their addresses; for many tokens, blocks of rows stay in the
// cache.
template <class F>
void scaled_matmul(const MatmulCall& call) {
  const int64_t block = call.tokens <= kScaledTokens ? call.rows : 16;
  const int64_t tiles = (call.tokens + kScaledTokens - 1) / kScaledTokens;
  for (int64_t row = 0; row < call.rows; row += block) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t token = call.tokens * tile / tiles, next = call.tokens * (tile + 1) / tiles;
      scaled_rows<F, kScaledTokens>(call, row, least(call.rows, row + block), token, next - token,
                                    tile == 0);
    }
  }
}

template <class F>
void scaled_pack(const void* x, int type, int64_t first, int64_t count, int64_t inputs, int,
                 void* group) {
  static_assert(kPackAlign == 32 && F::kInputs % 32 == 0, "pieces are whole blocks");
  float* to = static_cast<float*>(group);
  const int64_t end = first + count == inputs ? round_up(inputs, F::kInputs) : first + count;
  with_type(type, [&](auto* t) {
    const auto* from = at(x, t);
    for (int64_t k = first; k < end; k += 32) {
      float in[32] = {};
      const int64_t have = greatest(0, least(32, first + count - k));
      for (int64_t i = 0; i < have; ++i) in[i] = widen(from[k - first + i]);
      F::place(in, to, k);
    }
  });
}

template <class F>
constexpr Matmul kScaledMatmul = {1, F::kInputs, sizeof(float), scaled_pack<F>, scaled_matmul<F>};
