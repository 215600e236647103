// Formats with scales, 16 rows at a time: numbers for the left tile, scales for sums of rows.
// Included by scaled_amx.cpp within its namespace.

// 32 codes in 16 bytes, in the order of by_nibble.
__m512i numbers_of(const uint8_t* p, __m512i table) {
  const __m512i words =
      _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i shifts =
      _mm512_setr_epi32(0, 0, 0, 0, 0x40004, 0x40004, 0x40004, 0x40004, 0x80008, 0x80008, 0x80008,
                        0x80008, 0xc000c, 0xc000c, 0xc000c, 0xc000c);
  return _mm512_permutexvar_epi16(_mm512_srlv_epi16(words, shifts), table);
}

// 16 rows of a matrix, or the last ones: the last then stands for those that are missing.
struct Block {
  const uint8_t* numbers;
  const uint8_t* scales;
  int64_t number_bytes, scale_bytes;  // of a row
  int64_t last;                       // row
  int64_t first_row;                  // in the matrix
};

void ask_for(const uint8_t* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, 2);
}

// A row's scales lie one after the other. Those of 16 rows are turned round, 16 bytes of each at a
// time, and kept as bytes until they are used.
template <const uint16_t (&kNumbers)[16], int kColumns, int kBytes>  // of a scale
struct FourBits {
  static constexpr int kLines = 4;                   // of 64 bytes in a left tile's codes
  static constexpr int kScales = kChunk / kColumns;  // of a row in a chunk
  static constexpr int kParts = kTileInputs / kColumns;
  static constexpr int kVectors = kRows * kScales * kBytes / 64;  // of a chunk's scales
  static constexpr int kAtOnce = 4 / kVectors;                    // chunks of 16 bytes
  static constexpr int kKept = 8;  // chunks: those that come at once, and two that wait
  static constexpr float kUnit = 1.0f;

  __m512i scales[kKept * kVectors];

  static int64_t number_bytes(int64_t inputs) { return inputs / 2; }
  static int64_t scale_bytes(int64_t inputs) { return inputs / kColumns * kBytes; }
  static const uint8_t* first_scales(const Matrix& m, int64_t row) {
    return m.scales + row * scale_bytes(m.inputs);
  }
  static int64_t tiles(int64_t inputs) { return inputs / kTileInputs; }

  // Left tile ``tile``, from 16 rows of codes.
  template <int t>
  void unpack(const uint8_t* const* rows, int64_t tile, int64_t, uint8_t* to) {
    const __m512i table = number_table(kNumbers);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      _mm512_store_si512(to + r * 64, numbers_of(rows[r] + 16 * tile, table));
  }

  static void announce_scales(const Block& block) {  // of the next rows
    ask_for(block.scales + kRows * block.scale_bytes, kRows * block.scale_bytes);
  }

  void prepare(const Block& block, int64_t chunk) {
    if (chunk % kAtOnce) return;
    const int64_t at = chunk * kScales * kBytes;
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
    __m512i* to = scales + chunk % kKept * kVectors;
    if constexpr (kBytes == 1) {  // a vector has four scales of four rows in each lane
      const __m512i a = _mm512_unpacklo_epi8(rows[0], rows[1]);
      const __m512i b = _mm512_unpacklo_epi8(rows[2], rows[3]);
      const __m512i c = _mm512_unpackhi_epi8(rows[0], rows[1]);
      const __m512i d = _mm512_unpackhi_epi8(rows[2], rows[3]);
      to[0] = _mm512_unpacklo_epi16(a, b);
      to[1] = _mm512_unpackhi_epi16(a, b);
      to[2] = _mm512_unpacklo_epi16(c, d);
      to[3] = _mm512_unpackhi_epi16(c, d);
    } else {  // two
      const __m512i a = _mm512_unpacklo_epi16(rows[0], rows[1]);
      const __m512i b = _mm512_unpacklo_epi16(rows[2], rows[3]);
      const __m512i c = _mm512_unpackhi_epi16(rows[0], rows[1]);
      const __m512i d = _mm512_unpackhi_epi16(rows[2], rows[3]);
      to[0] = _mm512_unpacklo_epi32(a, b);
      to[1] = _mm512_unpackhi_epi32(a, b);
      to[2] = _mm512_unpacklo_epi32(c, d);
      to[3] = _mm512_unpackhi_epi32(c, d);
    }
  }

  // Of each row, for part of left tile t of a chunk.
  template <int t>
  __m512 scale(const Block&, int64_t chunk, int part) const {
    constexpr int kEach = kScales / kVectors;
    const int i = t * kParts + part;
    const __m512i from = scales[chunk % kKept * kVectors + i / kEach];
    // the scale's last byte becomes a float's last or, where a shift follows, its third
    const __m128i first =
        kBytes == 2 ? _mm_setr_epi32(0x01008080, 0x03028080, 0x05048080, 0x07068080)
        : kColumns == 16
            ? _mm_setr_epi32(0x00808080, 0x01808080, 0x02808080, 0x03808080)
            : _mm_setr_epi32(int(0x80008080), int(0x80018080), int(0x80028080), int(0x80038080));
    const int next = kBytes == 2 ? 0x08080000 : kColumns == 16 ? 0x04000000 : 0x00040000;
    const __m512i which =
        _mm512_add_epi32(_mm512_broadcast_i32x4(first), _mm512_set1_epi32(next * (i % kEach)));
    const __m512i wide = _mm512_shuffle_epi8(from, which);
    if constexpr (kBytes == 2) return _mm512_castsi512_ps(wide);
    if constexpr (kColumns == 32) return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 7));
    // e4m3: 2^120 moves the exponent from bias 7 to 127 and makes subnormals normal on the way
    const __m512i bits =
        _mm512_and_si512(_mm512_srai_epi32(wide, 4), _mm512_set1_epi32(int(0x87f00000)));
    return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
  }

  template <int kLanes>
  static void place(__m512i in, int64_t k, __m512i pairs, int32_t* to) {
    to += k / kTileInputs * kParts * 16 * kLanes;
    in = by_nibble(in);
    if constexpr (kParts == 1) {
      _mm512_i32scatter_epi32(to, pairs, in, 4);
    } else {  // two of four pairs have inputs 0..15
      _mm512_i32scatter_epi32(to, pairs, _mm512_maskz_mov_epi32(0x3333, in), 4);
      _mm512_i32scatter_epi32(to + 16 * kLanes, pairs, _mm512_maskz_mov_epi32(0xcccc, in), 4);
    }
  }
};

using Mxfp4 = FourBits<kFp4Bits, 32, 1>;
using Nvfp4 = FourBits<kFp4Bits, 16, 1>;
using Int4 = FourBits<kInt4Bits, 32, 2>;

template <int kColumns>  // inputs that share a scale, as as many rows do; 0: a whole row
struct Fp8 {
  static constexpr int kLines = 8;
  static constexpr int kParts = 1;
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
  __m512 scale(const Block& block, int64_t chunk, int) const {
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
