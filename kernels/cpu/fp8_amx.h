// FP8, 16 rows at a time. Included by each file of AMX within its own unnamed namespace, after
// unpack_fp8.h and blocks_amx.h.

template <int kColumns>  // inputs that share a scale, as as many rows do; 0: a whole row
struct Fp8 {
  static constexpr int kLines = 8;
  static constexpr int kTilesOfSum = kTiles;
  static constexpr float kUnit = kFp8Unit;

  static int64_t number_bytes(int64_t inputs) { return inputs; }
  static int64_t scale_bytes(int64_t inputs) {
    return kColumns ? (inputs + kChunk - 1) / kChunk * 4 : 4;
  }
  static const uint8_t* first_scales(const Matrix& m, int64_t row) {
    return m.scales + (kColumns ? row / kColumns : row) * scale_bytes(m.inputs);
  }
  static int64_t tiles(int64_t inputs) { return (inputs + 63) / 64 * 2; }

  bool subnormal;  // whether there are such among the codes that were seen last

  // The even or the odd ones of 64 inputs.
  template <int t>
  void unpack(const uint8_t* const* rows, int64_t tile, int64_t inputs, uint8_t* to) {
    const int64_t first = tile / 2 * 64;
    const __mmask64 here = ~0ull >> (64 - least(64, inputs - first));
    auto codes = [&](int r) { return _mm512_maskz_loadu_epi8(here, rows[r] + first); };
    auto high = [&](__m512i all) { return t % 2 ? all : _mm512_slli_epi16(all, 8); };
    __mmask64 found = 0;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const __m512i all = codes(r);
      if (t % 2 == 0) found |= _mm512_testn_epi8_mask(all, _mm512_set1_epi8(0x78));
      _mm512_store_si512(to + r * 64, normal_fp8(high(all)));
    }
    if (t % 2 == 0) subnormal = found != 0;
    for (int r = 0; subnormal && r < kRows; ++r)
      _mm512_store_si512(to + r * 64, any_fp8(high(codes(r))));
  }

  static void announce_scales(const Block&) {}
  void prepare(const Block&, int64_t) {}

  template <int t>
  __m512 scale(const Block& block, int64_t chunk) const {
    const float* first = reinterpret_cast<const float*>(block.scales);
    if constexpr (kColumns == 0) {
      return _mm512_maskz_loadu_ps(__mmask16((2u << block.last) - 1), first);
    } else {  // rows from here on have the next scales
      const int64_t border = kColumns - block.first_row % kColumns;
      const float* next = border > block.last ? first : first + block.scale_bytes / 4;
      const __mmask16 later = __mmask16(border < kRows ? 0xffff << border : 0);
      return _mm512_mask_mov_ps(_mm512_set1_ps(first[chunk]), later, _mm512_set1_ps(next[chunk]));
    }
  }

  template <int kLanes>
  static void place(__m512i in, int64_t k, __m512i pairs, int32_t* to) {
    to += (k / 64 * 2 * 16 + k % 64 / 4) * kLanes;
    in = by_byte(in);
    _mm512_mask_i32scatter_epi32(to, 0x00ff, pairs, in, 4);
    _mm512_mask_i32scatter_epi32(to + 8 * kLanes, 0xff00, pairs, in, 4);  // of the next tile
  }
};
