// Causal attention over paged keys and values, in blocks of 256 absolute positions.
//
// Each block of a row has its own maximum, sum and weighted values; blocks are merged in the order
// of their positions. So a row's result depends on its keys alone: not on chunks, pages, batch or
// threads. Heads of one kv head, and up to eight rows of a sequence, share what is read. Where rows
// are too few for the threads, blocks of a row are spread as well, and the last one to finish
// merges. A sink, a logit whose probability goes nowhere, is one more block without values: the
// last.
#include <atomic>
#include <new>

#include "ops.h"

using namespace ftd;

namespace {

constexpr int64_t kRowGroup = 8;
constexpr int64_t kUnitsPerThread = 4;      // fewer units of whole rows than this: spread blocks
constexpr size_t kSpreadFloats = 16 << 20;  // of partial results, at most: 64 MiB

// Consecutive rows of one sequence.
struct Rows {
  int64_t first, count;
  int32_t sequence;
};

struct Attention {
  const Kernels& kernels;
  const void *k_pages, *v_pages;
  int act;
  const int32_t *page_table, *position;
  int64_t table_width, kv_heads, group, head_dim, padded, page_tokens, window;
  float scale;
  const float* q;             // [rows, heads, padded]
  const float* sinks;         // [heads] or null
  const float *ones, *zeros;  // sum and weighted values of a kv head's sinks
  void* out;

  int64_t begin(int64_t row) const { return window ? greatest(0, position[row] + 1 - window) : 0; }
  int64_t end(int64_t row) const { return position[row] + 1; }
  int64_t first_block(int64_t row) const { return begin(row) / kKeyBlock; }
  int64_t end_block(int64_t row) const { return (end(row) + kKeyBlock - 1) / kKeyBlock; }
  int64_t first_block(const Rows& rows) const {
    int64_t block = first_block(rows.first);
    for (int64_t r = 1; r < rows.count; ++r) block = least(block, first_block(rows.first + r));
    return block;
  }
  int64_t end_block(const Rows& rows) const {
    int64_t block = 0;
    for (int64_t r = 0; r < rows.count; ++r) block = greatest(block, end_block(rows.first + r));
    return block;
  }
  int64_t num_blocks(const Rows& rows) const { return end_block(rows) - first_block(rows); }
};

// Maxima, sums and weighted values of G heads.
struct Partial {
  float *max, *sum, *acc;

  static size_t floats(const Attention& a) {
    return size_t(round_up(2 * a.group, 16) + a.group * a.padded);
  }
  static Partial take(const Attention& a, Arena& arena) {
    float* p = arena.take<float>(floats(a));
    return {p, p + a.group, p + round_up(2 * a.group, 16)};
  }
};

// Scratch of one unit.
struct Scratch {
  float *score, *stage;

  Scratch(const Attention& a, int64_t rows, Arena& arena)
      : score(arena.take<float>(size_t(rows * a.group * kKeyBlock))),
        stage(arena.take<float>(size_t((kKeyStage + kKeyTile) * a.padded))) {}
};

// One block of keys for some rows of a kv head; a row that sees any of it gets its partial written.
void block_of(const Attention& a, const Rows& rows, int64_t kv_head, int64_t block,
              const Partial* partials, const Scratch& scratch) {
  AttentionRow row[kRowGroup];
  int64_t used = 0;
  const int64_t begin = block * kKeyBlock, end = begin + kKeyBlock;
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t index = rows.first + r;
    const int64_t from = greatest(begin, a.begin(index)), to = least(end, a.end(index));
    if (from >= to) continue;
    const float* q = a.q + (index * a.kv_heads + kv_head) * a.group * a.padded;
    float* score = scratch.score + used * a.group * kKeyBlock;
    row[used++] = {q, from, to, score, partials[r].max, partials[r].sum, partials[r].acc};
  }
  if (used == 0) return;
  const int64_t head_offset = kv_head * a.head_dim * type_bytes(a.act);
  a.kernels.attend({row, used, a.group, a.head_dim, begin, a.scale, offset(a.k_pages, head_offset),
                    offset(a.v_pages, head_offset), a.act, a.kv_heads * a.head_dim,
                    a.page_table + rows.sequence * a.table_width, a.page_tokens, scratch.stage});
}

void merge(const Attention& a, const Partial& into, const Partial& later) {
  a.kernels.merge(into.max, into.sum, into.acc, later.max, later.sum, later.acc, a.group, a.padded);
}

void write_out(const Attention& a, int64_t row, int64_t kv_head, const Partial& result) {
  if (a.sinks)
    a.kernels.merge(result.max, result.sum, result.acc, a.sinks + kv_head * a.group, a.ones,
                    a.zeros, a.group, a.padded);
  for (int64_t h = 0; h < a.group; ++h) {
    float* acc = result.acc + h * a.padded;
    for (int64_t d = 0; d < a.head_dim; ++d) acc[d] /= result.sum[h];
    const int64_t head = (row * a.kv_heads + kv_head) * a.group + h;
    a.kernels.narrow(acc, nullptr, offset(a.out, head * a.head_dim * type_bytes(a.act)), a.act,
                     a.head_dim);
  }
}

// All blocks of some rows, one after the other.
void whole_rows(const Attention& a, const Rows& rows, int64_t kv_head, Arena& arena) {
  const Scratch scratch(a, rows.count, arena);
  Partial total[kRowGroup], part[kRowGroup], into[kRowGroup];
  for (int64_t r = 0; r < rows.count; ++r) {
    total[r] = Partial::take(a, arena);
    part[r] = Partial::take(a, arena);
  }
  for (int64_t block = a.first_block(rows); block < a.end_block(rows); ++block) {
    for (int64_t r = 0; r < rows.count; ++r)
      into[r] = block == a.first_block(rows.first + r) ? total[r] : part[r];
    block_of(a, rows, kv_head, block, into, scratch);
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t row = rows.first + r;
      if (a.first_block(row) < block && block < a.end_block(row)) merge(a, total[r], part[r]);
    }
  }
  for (int64_t r = 0; r < rows.count; ++r) write_out(a, rows.first + r, kv_head, total[r]);
}

// The blocks of some rows of one kv head, for several threads.
struct Spread {
  Rows rows;
  int64_t kv_head, first_block, blocks;
  Partial* partials;  // [blocks, rows.count]
  std::atomic<int64_t> left;
};

void spread_block(const Attention& a, Spread& spread, int64_t block, Arena& arena) {
  const Rows& rows = spread.rows;
  block_of(a, rows, spread.kv_head, spread.first_block + block,
           spread.partials + block * rows.count, Scratch(a, rows.count, arena));
  if (spread.left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t row = rows.first + r, first = a.first_block(row) - spread.first_block;
    const Partial& total = spread.partials[first * rows.count + r];
    for (int64_t b = first + 1; b < a.end_block(row) - spread.first_block; ++b)
      merge(a, total, spread.partials[b * rows.count + r]);
    write_out(a, row, spread.kv_head, total);
  }
}

void run_spread(const Attention& a, Pool& pool, const Rows* groups, int64_t num_groups,
                int64_t cost) {
  struct Unit {
    Spread* spread;
    int64_t block;
  };
  Arena& arena = pool.shared();
  int64_t units = 0;
  for (int64_t g = 0; g < num_groups; ++g) units += a.num_blocks(groups[g]) * a.kv_heads;
  Unit* unit = arena.take<Unit>(size_t(units));
  int64_t next = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    const Rows& rows = groups[g];
    const int64_t blocks = a.num_blocks(rows);
    for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
      Partial* partials = arena.take<Partial>(size_t(blocks * rows.count));
      for (int64_t p = 0; p < blocks * rows.count; ++p) partials[p] = Partial::take(a, arena);
      auto* spread = new (arena.take<Spread>(1))
          Spread{rows, kv_head, a.first_block(rows), blocks, partials, {blocks}};
      // the heads of a block one after the other: they lie side by side in memory
      for (int64_t block = 0; block < blocks; ++block)
        unit[next + block * a.kv_heads + kv_head] = {spread, block};
    }
    next += blocks * a.kv_heads;
  }
  share(pool, units, cost, [&](int64_t u, int thread) {
    spread_block(a, *unit[u].spread, unit[u].block, pool.fresh(thread));
  });
}

int64_t group_rows(const int32_t* sequence, int64_t rows, Rows* groups) {
  int64_t count = 0;
  for (int64_t row = 0; row < rows; ++row) {
    Rows* last = count ? &groups[count - 1] : nullptr;
    if (last && last->sequence == sequence[row] && last->count < kRowGroup) {
      ++last->count;
    } else {
      groups[count++] = {row, 1, sequence[row]};
    }
  }
  return count;
}

}  // namespace

extern "C" int32_t ftd_attention(FtdOps* ops, const void* q, const void* k_pages,
                                 const void* v_pages, int32_t act, const int32_t* page_table,
                                 int64_t table_width, const int32_t* sequence,
                                 const int32_t* position, void* out, int64_t rows, int64_t heads,
                                 int64_t kv_heads, int64_t head_dim, int64_t page_tokens,
                                 float scale, int64_t window, const float* sinks) {
  if (!known(act)) return FTD_BAD_TYPE;
  if (kv_heads < 1 || heads % kv_heads || head_dim < 1 || page_tokens < 1 || window < 0)
    return FTD_BAD_SHAPE;
  for (int64_t row = 0; row < rows; ++row) {
    if (position[row] < 0 || position[row] >= table_width * page_tokens || sequence[row] < 0)
      return FTD_BAD_INDEX;
  }
  if (rows == 0) return 0;
  Pool& pool = ops->pool;
  const Kernels& kernels = ops->kernels;
  const Turn turn(pool);
  const int64_t padded = round_up(head_dim, kHeadAlign);

  float* wide = pool.shared().take<float>(size_t(rows * heads * padded));
  split(pool, rows * heads, 1, padded, [&](int64_t first, int64_t last, int) {
    for (int64_t h = first; h < last; ++h) {
      kernels.widen(offset(q, h * head_dim * type_bytes(act)), act, wide + h * padded, head_dim);
      for (int64_t d = head_dim; d < padded; ++d) wide[h * padded + d] = 0.0f;
    }
  });
  const int64_t group = heads / kv_heads;
  float* ones = pool.shared().take<float>(size_t(group));
  float* zeros = pool.shared().take<float>(size_t(group * padded));
  for (int64_t h = 0; h < group; ++h) ones[h] = 1.0f;
  for (int64_t d = 0; d < group * padded; ++d) zeros[d] = 0.0f;
  const Attention a = {kernels,  k_pages, v_pages,  act,    page_table,  position, table_width,
                       kv_heads, group,   head_dim, padded, page_tokens, window,   scale,
                       wide,     sinks,   ones,     zeros,  out};

  Rows* groups = pool.shared().take<Rows>(size_t(rows));
  const int64_t num_groups = group_rows(sequence, rows, groups);
  int64_t keys = 0;
  for (int64_t row = 0; row < rows; ++row) keys += a.end(row) - a.begin(row);
  const int64_t cost = cost_of(0, 2 * keys * heads * head_dim);
  size_t spread_floats = 0;
  for (int64_t g = 0; g < num_groups; ++g)
    spread_floats +=
        size_t(a.num_blocks(groups[g]) * groups[g].count * kv_heads) * Partial::floats(a);
  const bool few = num_groups * kv_heads < kUnitsPerThread * pool.threads();
  if (few && pool.threads() > 1 && spread_floats <= kSpreadFloats) {
    run_spread(a, pool, groups, num_groups, cost);
  } else {
    share(pool, num_groups * kv_heads, cost, [&](int64_t unit, int thread) {
      whole_rows(a, groups[unit / kv_heads], unit % kv_heads, pool.fresh(thread));
    });
  }
  return 0;
}
