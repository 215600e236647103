// AMX: weights of scaled formats times bf16 activations, for three tokens and more.
//
// 32 inputs of 16 weight rows are unpacked into the left tile, whose products with the tokens are
// exact. A tile of sums belongs to inputs that share a scale in each row: it is stored, and goes,
// times these scales, into sums in registers. Where only 16 inputs share a scale, tokens lie there
// twice, each time with zeros for the other 16. Tokens lie in groups of 4 or 16, inputs in pairs,
// in the order in which unpacking hands out weights: [tile][part][16 pairs][tokens][2].
//
// Unpacking, multiplying, storing and adding go through a block of rows one behind the other: what
// a tile or a vector is loaded from has then reached the cache, and none waits for the one before
// it.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12 warns of its own undefined vectors
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")

namespace ftd {
namespace {

#include "inputs_avx512bf16.h"
#include "tiles_amx.h"
#include "unpack_four_bits.h"
#include "unpack_fp8.h"
// needs the four above
#include "formats_amx.h"

// Steps behind unpacking, and the left tiles that are kept meanwhile.
constexpr int kMultiply = 3, kStore = 4, kAdd = 7;
constexpr int kSlots = 4;

template <class F, int kLanes, int kGroups>
struct Product {
  static constexpr int kEach = F::kParts * kGroups;  // tiles of sums for a left tile
  static constexpr int kSums = kRows * kLanes;       // of a tile
  static constexpr int kVectors = kSums / 16;
  static constexpr int kKept = 4;  // left tiles whose sums wait

  alignas(64) uint8_t weights[kSlots * kTileBytes];
  alignas(64) float sums[kKept * kEach * kSums];
  __m512 acc[kGroups][kVectors];
  const uint8_t* rows[kRows];
  F format;

  // Sums i of left tile t, of which there are four in turn.
  template <int t, int i>
  static void multiply(const uint8_t* const* x, int64_t tile) {
    constexpr int kSum = (t * kEach + i) % 4, kPart = i / kGroups, kGroup = i % kGroups;
    constexpr int kRight = kSums * 4;  // bytes of a tile of tokens
    load_tile<6 + kSum % 2>(x[kGroup] + (tile * F::kParts + kPart) * kRight, kLanes * 4);
    multiply_tiles<kSum, 4 + t % 2>();
  }
  template <int t>
  void multiply(const uint8_t* const* x, int64_t tile) {
    load_tile<4 + t % 2>(weights + t % kSlots * kTileBytes, 64);
    multiply<t, 0>(x, tile);
    if constexpr (kEach > 1) multiply<t, 1>(x, tile);
    if constexpr (kEach > 2) multiply<t, 2>(x, tile), multiply<t, 3>(x, tile);
  }
  template <int t>
  void store() {
    float* to = sums + t * kEach * kSums;
    store_tile<t * kEach % 4>(to, kLanes * 4);
    if constexpr (kEach > 1) store_tile<(t * kEach + 1) % 4>(to + kSums, kLanes * 4);
    if constexpr (kEach > 2) store_tile<2>(to + 2 * kSums, kLanes * 4);
    if constexpr (kEach > 2) store_tile<3>(to + 3 * kSums, kLanes * 4);
  }
  template <int t>
  void add(const Block& block, int64_t tile) {
#pragma GCC unroll 2
    for (int part = 0; part < F::kParts; ++part) {
      const __m512 scale = format.template scale<t>(block, tile / kTiles, part);
      alignas(64) float scales[kRows];
      if (kLanes == 16) _mm512_store_ps(scales, scale);
      for (int v = 0; v < kVectors; ++v) {
        __m512 here;
        if constexpr (kLanes == 16) {
          here = _mm512_set1_ps(scales[v]);
        } else {
          const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
          here = _mm512_permutexvar_ps(_mm512_add_epi32(which, _mm512_set1_epi32(4 * v)), scale);
        }
        for (int g = 0; g < kGroups; ++g) {
          const float* from = sums + (t * kEach + part * kGroups + g) * kSums + v * 16;
          acc[g][v] = _mm512_fmadd_ps(here, _mm512_load_ps(from), acc[g][v]);
        }
      }
    }
  }

  template <int t>  // step % 4
  void step(const Block& block, int64_t step, int64_t inputs, const uint8_t* const* x,
            const uint8_t* ahead) {
    const int64_t tiles = F::tiles(inputs);
    auto within = [&](int64_t tile) { return uint64_t(tile) < uint64_t(tiles); };
    if (step < tiles) {
      format.template unpack<t>(rows, step, inputs, weights + t % kSlots * kTileBytes);
      for (int line = 0; ahead && line < F::kLines; ++line)
        __builtin_prefetch(ahead + (step * F::kLines + line) * 64, 0, 2);
    }
    if (within(step - kStore)) store<(t + 4 - kStore % 4) % 4>();
    if (within(step - kMultiply)) multiply<(t + 4 - kMultiply % 4) % 4>(x, step - kMultiply);
    if (within(step - kAdd)) add<(t + 4 - kAdd % 4) % 4>(block, step - kAdd);
  }

  // x: a group's tokens; ahead: the bytes to ask for meanwhile, in their order.
  void run(const Block& block, int64_t inputs, const void* const* groups, const uint8_t* ahead) {
    for (int r = 0; r < kRows; ++r)
      rows[r] = block.numbers + least(r, block.last) * block.number_bytes;
    const uint8_t* x[kGroups];
    for (int g = 0; g < kGroups; ++g) {
      x[g] = static_cast<const uint8_t*>(groups[g]);
      for (int v = 0; v < kVectors; ++v) acc[g][v] = _mm512_setzero_ps();
    }
    const int64_t tiles = F::tiles(inputs);
    for (int64_t s = 0; s < tiles + kAdd; s += kTiles) {
      if (s < tiles) format.prepare(block, s / kTiles);
      step<0>(block, s, inputs, x, ahead);
      step<1>(block, s + 1, inputs, x, ahead);
      step<2>(block, s + 2, inputs, x, ahead);
      step<3>(block, s + 3, inputs, x, ahead);
    }
  }

  // out[token * stride + row], so many rows of each
  void write(int g, int64_t rows, int64_t tokens, float unit, float* out, int64_t stride) const {
    const __m512 times = _mm512_set1_ps(unit * F::kUnit);
    if constexpr (kLanes == 4) {
      const __m512i turned =
          _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      for (int v = 0; v < kVectors; ++v) {
        const __m512 four = _mm512_permutexvar_ps(turned, _mm512_mul_ps(acc[g][v], times));
        const int64_t left = greatest(0, least(4, rows - 4 * v));
        const __mmask8 here = __mmask8((1u << left) - 1);
        float* to = out + 4 * v;
        _mm_mask_storeu_ps(to, here, _mm512_castps512_ps128(four));
        if (tokens > 1) _mm_mask_storeu_ps(to + stride, here, _mm512_extractf32x4_ps(four, 1));
        if (tokens > 2) _mm_mask_storeu_ps(to + 2 * stride, here, _mm512_extractf32x4_ps(four, 2));
        if (tokens > 3) _mm_mask_storeu_ps(to + 3 * stride, here, _mm512_extractf32x4_ps(four, 3));
      }
    } else {
      alignas(64) float all[kRows][kLanes];
      for (int r = 0; r < kRows; ++r) _mm512_store_ps(all[r], _mm512_mul_ps(acc[g][r], times));
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t r = 0; r < rows; ++r) out[t * stride + r] = all[r][t];
    }
  }
};

// All rows for kGroups groups of tokens from token on.
template <class F, int kLanes, int kGroups>
void block_times_tokens(const MatmulCall& call, int64_t row, int64_t token, const uint8_t* ahead) {
  const int64_t first = call.first_row + row, rows = least(kRows, call.rows - row);
  const int64_t number_bytes = F::number_bytes(call.inputs);
  const Block block = {call.weight + row * number_bytes,
                       F::first_scales(*call.matrix, first),
                       number_bytes,
                       F::scale_bytes(call.inputs),
                       rows - 1,
                       first};
  if (ahead) F::announce_scales(block);
  Product<F, kLanes, kGroups> product;
  product.run(block, call.inputs, call.x + token / kLanes, ahead);
  for (int g = 0; g < kGroups; ++g) {
    const int64_t at = token + g * kLanes;
    product.write(g, rows, least(kLanes, call.tokens - at), call.matrix->factor,
                  call.out + at * call.out_stride + row, call.out_stride);
  }
}

template <class F, int kLanes>
void matmul(const MatmulCall& call) {
  const TileConfig<kLanes> config;
  _tile_loadconfig(&config);
  constexpr int kMost = kLanes == 4 ? 2 : 1;  // groups at a time
  if (!call.announced) ask_for(call.weight, least(kRows, call.rows) * F::number_bytes(call.inputs));
  for (int64_t row = 0; row < call.rows; row += kRows) {
    const uint8_t* after = call.weight + (row + kRows) * F::number_bytes(call.inputs);
    const uint8_t* ahead = row + 2 * kRows <= call.rows ? after
                           : row + kRows >= call.rows   ? call.then
                                                        : nullptr;
    for (int64_t token = 0; token < call.tokens; token += kMost * kLanes) {
      if (kMost == 2 && call.tokens - token > kLanes) {
        block_times_tokens<F, kLanes, kMost>(call, row, token, token ? nullptr : ahead);
      } else {
        block_times_tokens<F, kLanes, 1>(call, row, token, token ? nullptr : ahead);
      }
    }
  }
  _tile_release();
}

template <class F, int kLanes>
void pack(const void* x, int type, int64_t first, int64_t count, int64_t inputs, int lane,
          void* group) {
  const __m512i pairs =
      _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                         _mm512_set1_epi32(kLanes));
  int32_t* to = static_cast<int32_t*>(group) + lane;
  const int64_t end = first + count == inputs ? round_up(inputs, kChunk) : first + count;
  for (int64_t k = first; k < end; k += kPiece)
    F::template place<kLanes>(load_inputs(x, type, k - first, count), k, pairs, to);
}

// Fewer tokens are faster row by row.
constexpr int64_t kFrom = 3;

template <class F, int kLanes>
constexpr Matmul kMatmul = {
    kLanes, kChunk, 2 * F::kParts, pack<F, kLanes>, matmul<F, kLanes>, kLanes == 4 ? kFrom : 9};

template <class F>
void use(Kernels& kernels, int format) {
  kernels.grouped[0][format][FTD_BF16] = &kMatmul<F, 4>;
  kernels.grouped[1][format][FTD_BF16] = &kMatmul<F, 16>;
}

}  // namespace

void use_amx_scaled(Kernels& kernels) {
  use<Mxfp4>(kernels, FTD_MXFP4);
  use<Nvfp4>(kernels, FTD_NVFP4);
  use<Int4>(kernels, FTD_INT4);
  use<Fp8<128>>(kernels, FTD_FP8);
  use<Fp8<0>>(kernels, FTD_FP8_ROW);
}

}  // namespace ftd

#endif
