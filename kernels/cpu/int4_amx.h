// Int4, 16 rows at a time, for sums that have yet to be scaled. Included by scaled_amx.cpp within
// its namespace.

// A row's scales lie one after the other. Those of 16 rows are turned round, 16 bytes of each at a
// time: two chunks of inputs.
struct Int4 {
  static constexpr int kLines = 4;  // of 64 bytes in a left tile's codes
  static constexpr int kTilesOfSum = 1;
  static constexpr float kUnit = 1.0f;
  static constexpr int kAtOnce = 2;   // chunks
  static constexpr int kVectors = 2;  // of a chunk's scales
  static constexpr int kKept = 4;     // chunks: those that come at once, and two that wait

  __m512i scales[kKept * kVectors];

  static int64_t number_bytes(int64_t inputs) { return inputs / 2; }
  static int64_t scale_bytes(int64_t inputs) { return inputs / 32 * 2; }
  static const uint8_t* first_scales(const Matrix& m, int64_t row) {
    return m.scales + row * scale_bytes(m.inputs);
  }
  static int64_t tiles(int64_t inputs) { return inputs / kTileInputs; }

  // Left tile ``tile``, from 16 rows of codes.
  template <int t>
  void unpack(const uint8_t* const* rows, int64_t tile, int64_t, uint8_t* to) {
    const __m512i table = number_table(kInt4Bits);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      _mm512_store_si512(to + r * 64,
                         _mm512_permutexvar_epi16(codes_of(rows[r] + 16 * tile), table));
  }

  static void announce_scales(const Block& block) {  // of the next rows
    ask_for(block.scales + kRows * block.scale_bytes, kRows * block.scale_bytes);
  }

  void prepare(const Block& block, int64_t chunk) {
    if (chunk % kAtOnce) return;
    const int64_t at = chunk * kTiles * 2;
    const int64_t left = least(16, block.scale_bytes - at);
    auto row = [&](int r) {
      return _mm_maskz_loadu_epi8(__mmask16((1u << left) - 1),
                                  block.scales + least(r, block.last) * block.scale_bytes + at);
    };
    __m512i rows[4];  // row a, a + 4, a + 8, a + 12
    for (int a = 0; a < 4; ++a) {
      rows[a] = _mm512_castsi128_si512(row(a));
      rows[a] = _mm512_inserti32x4(rows[a], row(a + 4), 1);
      rows[a] = _mm512_inserti32x4(rows[a], row(a + 8), 2);
      rows[a] = _mm512_inserti32x4(rows[a], row(a + 12), 3);
    }
    __m512i* to = scales + chunk % kKept * kVectors;  // two scales of four rows in each lane
    const __m512i a = _mm512_unpacklo_epi16(rows[0], rows[1]);
    const __m512i b = _mm512_unpacklo_epi16(rows[2], rows[3]);
    const __m512i c = _mm512_unpackhi_epi16(rows[0], rows[1]);
    const __m512i d = _mm512_unpackhi_epi16(rows[2], rows[3]);
    to[0] = _mm512_unpacklo_epi32(a, b);
    to[1] = _mm512_unpackhi_epi32(a, b);
    to[2] = _mm512_unpacklo_epi32(c, d);
    to[3] = _mm512_unpackhi_epi32(c, d);
  }

  // Of each row, for left tile t of a chunk.
  template <int t>
  __m512 scale(const Block&, int64_t chunk) const {
    const __m512i from = scales[chunk % kKept * kVectors + t % kTiles / 2];
    // the scale's two bytes become a float's upper ones
    const __m512i first =
        _mm512_broadcast_i32x4(_mm_setr_epi32(0x01008080, 0x03028080, 0x05048080, 0x07068080));
    const __m512i which = _mm512_add_epi32(first, _mm512_set1_epi32(0x08080000 * (t % 2)));
    return _mm512_castsi512_ps(_mm512_shuffle_epi8(from, which));
  }

  template <int kLanes>
  static void place(__m512i in, int64_t k, __m512i pairs, int32_t* to) {
    _mm512_i32scatter_epi32(to + k / kTileInputs * 16 * kLanes, pairs, by_nibble(in), 4);
  }
};
