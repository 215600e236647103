// AMX: bf16 weights times bf16 activations for five tokens and more, 16 rows by 16 tokens at a
// time.
//
// Weights are read in place as the left tile: 16 rows of 32 numbers. Tokens lie in groups of 16,
// inputs in pairs: [inputs / 2][16 tokens][2], which is how the right tile wants them. One group
// for few tokens is enough to be bound by memory: a weight is used 16 times for each load.
// Formats with scales are in scaled_amx.cpp; fewer tokens, and everything else, are AVX512-BF16's.
// Sapphire Rapids and later.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")

namespace ftd {
namespace {

constexpr int kRows = 16;    // of a tile
constexpr int kLanes = 16;   // tokens of a group
constexpr int kInputs = 32;  // of a tile
constexpr int kTileBytes = 1024;

// Tiles 0..3 hold sums (row tile, group), 4 and 5 weights, 6 and 7 tokens: all 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 16 weight rows. The last ones of a matrix and the end of a row are copied, so that no tile reads
// past them; what is missing is zero.
struct RowTile {
  const uint8_t* data;
  int64_t row_bytes;
  int64_t rows;

  const void* at(int64_t k, int64_t inputs, uint8_t* copy, int64_t& stride) const {
    if (rows >= kRows && k + kInputs <= inputs) {
      stride = row_bytes;
      return data + k * 2;
    }
    stride = 64;
    memset(copy, 0, kTileBytes);
    const int64_t bytes = least(kInputs, inputs - k) * 2;
    for (int64_t r = 0; r < least(kRows, rows); ++r)
      memcpy(copy + r * 64, data + r * row_bytes + k * 2, size_t(bytes));
    return copy;
  }
};

// Up to 32 rows by up to two groups; asks for the bytes of ahead meanwhile, in their order.
template <bool kTwoRows, bool kTwoGroups>
void multiply(const RowTile* rows, int64_t inputs, const uint8_t* group0, const uint8_t* group1,
              const char* ahead, float (*sums)[kRows * kLanes]) {
  alignas(64) uint8_t copy[2][kTileBytes];
  const int64_t ahead_bytes = (kTwoRows ? 2 : 1) * kTileBytes;
  _tile_zero(0);
  if (kTwoGroups) _tile_zero(1);
  if (kTwoRows) _tile_zero(2);
  if (kTwoRows && kTwoGroups) _tile_zero(3);
  for (int64_t k = 0; k < inputs; k += kInputs) {
    if (ahead) {
      for (int64_t line = 0; line < ahead_bytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
      ahead += ahead_bytes;
    }
    int64_t stride;
    const void* w = rows[0].at(k, inputs, copy[0], stride);
    _tile_loadd(4, w, stride);
    _tile_loadd(6, group0 + k / kInputs * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (kTwoGroups) {
      _tile_loadd(7, group1 + k / kInputs * kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kTwoRows) {
      w = rows[1].at(k, inputs, copy[1], stride);
      _tile_loadd(5, w, stride);
      _tile_dpbf16ps(2, 5, 6);
      if (kTwoGroups) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], 64);
  if (kTwoGroups) _tile_stored(1, sums[1], 64);
  if (kTwoRows) _tile_stored(2, sums[2], 64);
  if (kTwoRows && kTwoGroups) _tile_stored(3, sums[3], 64);
}

// out[t][r] = sums[r][t]
void write(const float* sums, int64_t rows, int64_t tokens, float* out, int64_t stride) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t r = 0; r < rows; ++r) out[t * stride + r] = sums[r * kLanes + t];
}

void matmul(const MatmulCall& call) {
  const TileConfig config;
  _tile_loadconfig(&config);
  alignas(64) float sums[4][kRows * kLanes];
  const int64_t row_bytes = call.inputs * 2, end = call.rows * row_bytes;
  const char* weight = reinterpret_cast<const char*>(call.weight);
  // one group leaves memory as the limit: smaller blocks, of which the first comes unannounced
  const int64_t block = call.tokens > kLanes ? 2 * kRows : kRows;
  for (int64_t byte = 0; byte < least(end, block * row_bytes); byte += 64)
    __builtin_prefetch(weight + byte, 0, 2);
  for (int64_t row = 0; row < call.rows; row += block) {
    const uint8_t* data = call.weight + row * row_bytes;
    const RowTile tiles[2] = {{data, row_bytes, call.rows - row},
                              {data + kRows * row_bytes, row_bytes, call.rows - row - kRows}};
    const bool two_rows = tiles[1].rows > 0 && block > kRows;
    const char* ahead =
        (row + 2 * block) * row_bytes <= end ? weight + (row + block) * row_bytes : nullptr;
    for (int64_t token = 0; token < call.tokens; token += 2 * kLanes) {
      const auto* group0 = static_cast<const uint8_t*>(call.x[token / kLanes]);
      const bool two_groups = call.tokens - token > kLanes;
      const auto* group1 =
          two_groups ? static_cast<const uint8_t*>(call.x[token / kLanes + 1]) : nullptr;
      const auto run = two_rows ? (two_groups ? multiply<true, true> : multiply<true, false>)
                                : (two_groups ? multiply<false, true> : multiply<false, false>);
      run(tiles, call.inputs, group0, group1, token ? nullptr : ahead, sums);
      for (int r = 0; r < (two_rows ? 2 : 1); ++r) {
        for (int g = 0; g < (two_groups ? 2 : 1); ++g) {
          const int64_t first = token + g * kLanes;
          write(sums[2 * r + g], least(kRows, tiles[r].rows), least(kLanes, call.tokens - first),
                call.out + first * call.out_stride + row + r * kRows, call.out_stride);
        }
      }
    }
  }
  _tile_release();
}

void pack(const void* x, int type, int64_t first, int64_t count, int64_t inputs, int lane,
          void* group) {
  bf16* to = static_cast<bf16*>(group) + lane * 2;
  auto place = [&](int64_t k) -> bf16& { return to[k / 2 * (2 * kLanes) + k % 2]; };
  for (int64_t i = 0; i < count; ++i) {
    if (type == FTD_BF16) {
      place(first + i) = static_cast<const bf16*>(x)[i];
    } else {
      narrow(static_cast<const float*>(x)[i], place(first + i));
    }
  }
  if (first + count == inputs) {
    for (int64_t k = inputs; k < round_up(inputs, kInputs); ++k) place(k) = {0};
  }
}

// Where tiles overtake rows on Sapphire Rapids: 97 against 86 GB/s at four tokens, 63 against 86 at
// eight.
constexpr int64_t kFrom = 5;

constexpr Matmul kMatmul = {kLanes, kInputs, sizeof(bf16), pack, matmul, kFrom};

}  // namespace

const Kernels* amx_kernels() {
  static const Kernels kernels = [] {
    Kernels k = *avx512bf16_kernels();
    k.grouped[0][FTD_BF16][FTD_BF16] = &kMatmul;
    use_amx_four_bits(k);
    use_amx_exact(k);
    use_amx_scaled(k);
    return k;
  }();
  return &kernels;
}

}  // namespace ftd

#endif
