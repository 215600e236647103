// What one instruction set provides, as a table of functions; everything above it is written once.
//
// Order of additions. An element of W x is the sum of four vectors of partial sums; where a product
// goes is fixed by its place in the row, and the four are added as ((0 + 1) + (2 + 3)), then across
// lanes by a fixed tree. Rows end with zeros up to a whole step. So in float32 a result does not
// depend on the number of tokens, on threads or on the tile. Scaled formats have another such
// order: see scaled_kernels.h. The kernels for bf16 activations on AVX512-BF16 and AMX are free of
// this rule: contract and tests know it for float32 alone.
#pragma once

#include <stdint.h>
#include <string.h>

#include "ftd_cpu.h"
#include "numbers.h"

namespace ftd {

constexpr int kTypes = 3;
constexpr int kFormats = 8;     // rows of kernels/formats.py, of which the first are the types
constexpr int kPackAlign = 32;  // packed pieces may start at multiples of this many inputs
constexpr int kKeyBlock = 256;  // positions of an attention block: its softmax is merged in order
constexpr int kKeyStage = 64;   // positions widened to float32 at a time
constexpr int kKeyTile = 4;  // keys scored together: the stage has room for so many past the last
constexpr int kGroupSizes = 2;
constexpr int kHeadAlign = 16;  // head channels are padded to a multiple of this

constexpr int64_t type_bytes(int type) { return type == FTD_F32 ? 4 : 2; }
// Of the numbers of one row.
constexpr int64_t row_bytes(int format, int64_t inputs) {
  return format < kTypes         ? inputs * type_bytes(format)
         : format <= FTD_FP8_ROW ? inputs
                                 : inputs / 2;
}
// Rows that share scales, and what the scales of one row take.
constexpr int64_t scale_rows(int format) { return format == FTD_FP8 ? 128 : 1; }
constexpr int64_t scale_bytes(int format, int64_t inputs) {
  return format == FTD_FP8       ? (inputs + 127) / 128 * 4
         : format == FTD_FP8_ROW ? 4
         : format == FTD_MXFP4   ? inputs / 32
         : format == FTD_NVFP4   ? inputs / 16
         : format == FTD_INT4    ? inputs / 32 * 2
                                 : 0;
}
constexpr int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }

// A matrix where it lies.
struct Matrix {
  int format;
  int64_t inputs;  // K: numbers in a row
  const uint8_t* numbers;
  const uint8_t* scales;
  float factor;
  const float* bias;  // null: none

  Matrix(const void* record, const FtdMatrix& at, int64_t k)
      : format(at.format),
        inputs(k),
        numbers(static_cast<const uint8_t*>(record) + at.numbers),
        scales(static_cast<const uint8_t*>(record) + at.scales),
        factor(1.0f),
        bias(at.bias < 0
                 ? nullptr
                 : reinterpret_cast<const float*>(static_cast<const char*>(record) + at.bias)) {
    if (format == FTD_NVFP4)
      memcpy(&factor, static_cast<const char*>(record) + at.factor, sizeof factor);
  }
};

// out[t * out_stride + r] = weight row r · token t. Tokens lie packed in groups, as Matmul says.
struct MatmulCall {
  const uint8_t* weight;  // numbers of its first row
  int64_t inputs;         // K
  int64_t rows;
  const void* const* x;  // packed groups, each of Matmul::group tokens, the last one perhaps short
  int64_t tokens;
  float* out;
  int64_t out_stride;
  int64_t prefetch_bytes;
  const Matrix* matrix;
  int64_t first_row;              // in the matrix
  const uint8_t* then = nullptr;  // weights that this thread reads next, if they are known
  bool announced = false;         // whether these weights were so known to the call before

  MatmulCall(const Matrix& m, int64_t first, int64_t count, const void* const* packed, int64_t t,
             float* to, int64_t stride, int64_t prefetch)
      : weight(m.numbers + first * row_bytes(m.format, m.inputs)),
        inputs(m.inputs),
        rows(count),
        x(packed),
        tokens(t),
        out(to),
        out_stride(stride),
        prefetch_bytes(prefetch),
        matrix(&m),
        first_row(first) {}
};

// How far behind the first of ``count`` rows the weights lie that are to be asked for meanwhile.
// The last rows ask for what comes then, if that is known: anything else would be another unit's.
inline int64_t prefetch_after(const MatmulCall& call, int64_t row, int64_t count,
                              int64_t row_bytes) {
  const int64_t left = (call.rows - row) * row_bytes;
  if (left - count * row_bytes > call.prefetch_bytes) return call.prefetch_bytes;
  if (!call.then) return 0;
  return call.then - (call.weight + row * row_bytes) + greatest(0, call.prefetch_bytes - left);
}

// One way to multiply, and how it wants its tokens laid out.
struct Matmul {
  int group;    // tokens that lie together
  int step;     // inputs are padded with zeros to a multiple of this
  int x_bytes;  // of one packed input
  // Packs inputs [first, first + count) of a token into its lane of a group. The piece that ends
  // the row also writes the padding. first is a multiple of ``piece``.
  void (*pack)(const void* x, int type, int64_t first, int64_t count, int64_t inputs, int lane,
               void* group);
  void (*run)(const MatmulCall& call);
  int64_t from = 1;            // tokens that it is worth it for
  int64_t piece = kPackAlign;  // rows whose results are packed for it are dealt out in multiples

  int64_t group_bytes(int64_t inputs) const { return round_up(inputs, step) * x_bytes * group; }
};

// One row against one block of keys, for the heads that share a kv head.
struct AttentionRow {
  const float* q;      // [G, Dp] float32, padded with zeros
  int64_t begin, end;  // positions the row sees within the block
  float* score;        // [G, kKeyBlock]
  float* max;          // [G]
  float* sum;          // [G]
  float* acc;          // [G, Dp]
};

struct AttentionCall {
  const AttentionRow* rows;
  int64_t num_rows;
  int64_t heads;     // G: heads of a kv head
  int64_t head_dim;  // D
  int64_t block;     // first position of the block
  float scale;
  const void* k;  // key and value of the kv head in page 0, position 0
  const void* v;
  int type;
  int64_t position_stride;  // in numbers, from one position of a page to the next
  const int32_t* pages;     // of the sequence
  int64_t page_tokens;
  float* stage;  // [kKeyStage + kKeyTile, Dp]
};

constexpr int kDeltaColumns = 32;  // of a state that one call keeps at hand

// The gated delta rule over the rows of one sequence: ftd_delta_scan.
struct DeltaScan {
  const float* q;       // [T, N, DK]
  const float* k;       // [T, N, DK]
  const float* v;       // [T, N, DV]
  const float* decay;   // [T, N]
  const float* beta;    // [T, N]
  const float* source;  // [N, DK, DV] or null: zeros
  float* target;        // [N, DK, DV]; may be the source
  float* out;           // [T, N, DV]
  int64_t rows, heads, key_dim, value_dim;
};

struct Kernels {
  const Matmul* matmul[kFormats][kTypes];                // [weight][activation]: tokens lie singly
  const Matmul* grouped[kGroupSizes][kFormats][kTypes];  // the last that is worth it; or null

  // h of gate and up, rounded to the activation type, which is stored widened.
  void (*gate_up)(const float* gate, const float* up, float* h, int64_t count, int act,
                  const FtdActivation& activation);
  void (*silu_mul)(const void* gate, const void* up, void* y, int64_t count, int act);
  void (*widen)(const void* x, int type, float* y, int64_t count);
  void (*narrow)(const float* x, const float* bias, void* y, int type,
                 int64_t count);                                              // bias may be null
  void (*add_scaled)(const float* x, float weight, float* y, int64_t count);  // y += weight · x
  void (*rms_norm)(const void* x, int type, const float* weight, void* y, int out, int64_t width,
                   float eps);
  void (*rope)(void* x, int act, const float* cos, const float* sin, int64_t half, int interleaved);

  void (*attend)(const AttentionCall& call);
  // Adds a later block to what came before: both are [G] maxima, [G] sums and [G, Dp] weighted
  // values.
  void (*merge)(float* max, float* sum, float* acc, const float* later_max, const float* later_sum,
                const float* later_acc, int64_t heads, int64_t padded_dim);

  // Columns [column, column + kDeltaColumns) of a head's state, as far as there are some. stage has
  // key_dim · kDeltaColumns numbers.
  void (*delta)(const DeltaScan& scan, int64_t head, int64_t column, float* stage);

  int64_t (*read)(const void* data, int64_t bytes);
};

// Even building a table may use the instructions: ask isas.h first.
const Kernels* portable_kernels();
#if defined(__x86_64__)
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512bf16_kernels();
const Kernels* amx_kernels();
// The parts of avx512bf16_kernels for formats of four bits and for FP8.
void use_avx512bf16_scaled(Kernels& kernels);
void use_avx512bf16_fp8(Kernels& kernels);
// The parts of amx_kernels for few tokens of four-bit formats, and for several: of formats whose
// numbers are exact with their scales, and of the others.
void use_amx_four_bits(Kernels& kernels);
void use_amx_exact(Kernels& kernels);
void use_amx_scaled(Kernels& kernels);
#endif

// The way to multiply so many tokens at once.
inline const Matmul& choose(const Kernels& kernels, int format, int act, int64_t tokens) {
  const Matmul* best = kernels.matmul[format][act];
  for (const auto& sizes : kernels.grouped) {
    const Matmul* grouped = sizes[format][act];
    if (grouped && tokens >= grouped->from) best = grouped;
  }
  return *best;
}

}  // namespace ftd
