// y[t] = Σ_k weights[t, k] · W2 activation(W1 x[t], W3 x[t]) with the matrices of expert ids[t, k],
// each of which may add a bias.
//
// Routes are sorted by expert, so each distinct expert is read once: 3 · H · I weights. One job
// does gate and up rows of all experts, then down rows; whoever comes to an expert's down rows too
// early brings them into its cache meanwhile. A second one makes each token's sum over its routes,
// in the order of k whatever expert came first. Without weights there is no sum: each route's part
// is the result, and goes there directly.
#include <string.h>

#include <new>

#include "ops.h"
#include "units.h"

using namespace ftd;

namespace {

// How far an expert's gate and up rows have come; on a cache line of its own.
struct alignas(kCacheLine) Progress {
  std::atomic<int32_t> left{0};    // units
  std::atomic<bool> ready{false};  // h is there, packed
};

// Routes of one expert.
struct Group {
  const uint8_t* record;
  const int32_t* routes;  // t * K + k of each
  int64_t first;          // of them, counted over all experts
  int64_t count;
  const Matmul* gate_up;  // how its tokens are multiplied by W1 and W3 ...
  const Matmul* down;     // ... and W2
  const void** x;         // packed, for gate_up
  const void** h;         // packed, for down
  float* plain_h;         // [count, I] before it is packed as a whole; null: piece by piece
  Progress* progress;
  int node;
};

struct Moe {
  const FtdExpertLayout& layout;
  const FtdActivation& activation;
  int act;
  int64_t tokens, routes;
  Group* groups;   // by node, then by expert
  int32_t* place;  // [T, K] where a route's product lies, counted over all experts; -1: not in use
  int64_t num_groups;
  int64_t num_routes;
  bool few;  // so few routes that h is packed by whoever ends it: units of any length
};

constexpr int64_t kProductFloats = 4 << 20;  // of down's results before they are added: 16 MiB
constexpr int64_t kPlainFloats = 128 << 10;  // of h, if one thread packs an expert's
constexpr int64_t kAheadBytes = 256 << 10;   // that a waiting thread brings into its cache

// Units of a job, and where each node's end: its experts come first for its threads.
struct Job {
  Unit* units;
  int64_t count;
  int64_t* ends;
};

// Down rows of all groups, after their gate and up rows if these are still to be done.
Job deal_out(const Moe& moe, Pool& pool, bool gate_up, int64_t down_rows) {
  bool tiles = false;  // multiply 16 rows at a time
  for (int64_t g = 0; g < moe.num_groups; ++g) tiles |= moe.groups[g].gate_up->group > 1;
  const FtdExpertLayout& layout = moe.layout;
  const int64_t align = tiles ? 16 : 8, threads = greatest(1, pool.threads() / pool.nodes());
  const int64_t up_rows = gate_up ? layout.inner : 0;
  const Deal up = {Stage::gate_up, moe.few ? align : kPackAlign,
                   2 * row_bytes(layout.gate.format, layout.hidden), threads};
  const Deal down = {Stage::down, align, row_bytes(layout.down.format, layout.inner), threads};
  const int64_t most =
      up.most_units(0, moe.num_groups, up_rows) + down.most_units(0, moe.num_groups, down_rows);
  Job job = {pool.shared().take<Unit>(size_t(most)), 0,
             pool.shared().take<int64_t>(size_t(pool.nodes()))};
  Unit* end = job.units;
  int64_t begin = 0;
  for (int node = 0; node < pool.nodes(); ++node) {
    int64_t last = begin;
    while (last < moe.num_groups && moe.groups[last].node == node) ++last;
    const Unit* first = end;
    end = up.out(end, begin, last, up_rows);
    for (; first < end; ++first) moe.groups[first->group].progress->left += 1;
    end = down.out(end, begin, last, down_rows);
    job.ends[node] = end - job.units;
    begin = last;
  }
  job.count = end - job.units;
  return job;
}

// Sorts routes by expert. False where an id is out of range.
bool group_routes(Moe& moe, Pool& pool, const int32_t* ids, const int64_t* address,
                  int64_t experts) {
  Arena& arena = pool.shared();
  const int64_t all = moe.tokens * moe.routes;
  int32_t* begin = arena.take<int32_t>(size_t(experts + 1));
  memset(begin, 0, size_t(experts + 1) * sizeof *begin);
  for (int64_t r = 0; r < all; ++r) {
    if (ids[r] < -1 || ids[r] >= experts) return false;
    if (ids[r] >= 0) ++begin[ids[r] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) {
    moe.num_groups += begin[e + 1] > 0;
    begin[e + 1] += begin[e];
  }
  moe.num_routes = begin[experts];
  int32_t* sorted = arena.take<int32_t>(size_t(moe.num_routes));
  int32_t* next = arena.take<int32_t>(size_t(experts));
  memcpy(next, begin, size_t(experts) * sizeof *next);
  moe.place = arena.take<int32_t>(size_t(all));
  for (int64_t r = 0; r < all; ++r) {
    moe.place[r] = ids[r] < 0 ? -1 : next[ids[r]]++;
    if (ids[r] >= 0) sorted[moe.place[r]] = int32_t(r);
  }
  moe.groups = arena.take<Group>(size_t(moe.num_groups));
  int64_t g = 0;
  for (int node = 0; node < pool.nodes(); ++node) {
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t count = begin[e + 1] - begin[e];
      if (count == 0 || (pool.nodes() > 1 && pool.node_of(address[e]) != node)) continue;
      Group& group = moe.groups[g++];
      group = {};
      group.record = reinterpret_cast<const uint8_t*>(address[e]);
      group.routes = sorted + begin[e];
      group.first = begin[e];
      group.count = count;
      group.progress = new (arena.take<Progress>(1)) Progress;
      group.node = node;
    }
  }
  moe.few = moe.num_routes * moe.layout.inner <= kPlainFloats;
  return true;
}

// Packs x: once for all experts where tokens lie singly, expert by expert where they lie in groups.
void pack_inputs(Moe& moe, FtdOps& ops, const void* x) {
  Pool& pool = ops.pool;
  const int64_t hidden = moe.layout.hidden, inner = moe.layout.inner;
  const Matmul& single = *ops.kernels.matmul[moe.layout.gate.format][moe.act];
  const int64_t x_row_bytes = hidden * type_bytes(moe.act);
  bool any_single = false;
  int64_t num_grouped = 0;
  Group** grouped = pool.shared().take<Group*>(size_t(moe.num_groups));
  for (int64_t g = 0; g < moe.num_groups; ++g) {
    Group& group = moe.groups[g];
    group.gate_up = &choose(ops.kernels, moe.layout.gate.format, moe.act, group.count);
    group.down = &choose(ops.kernels, moe.layout.down.format, moe.act, group.count);
    group.h = packed_groups(pool.shared(), *group.down, group.count, inner).groups;
    if (moe.few) group.plain_h = pool.shared().take<float>(size_t(group.count * inner));
    if (group.gate_up->group == 1) {
      any_single = true;
      group.x = pool.shared().take<const void*>(size_t(group.count));
    } else {
      group.x = packed_groups(pool.shared(), *group.gate_up, group.count, hidden).groups;
      grouped[num_grouped++] = &group;
    }
  }
  if (any_single) {
    const Packed packed = packed_groups(pool.shared(), single, moe.tokens, hidden);
    split(pool, moe.tokens, 1, 2 * hidden, [&](int64_t first, int64_t last, int) {
      for (int64_t t = first; t < last; ++t)
        single.pack(offset(x, t * x_row_bytes), moe.act, 0, hidden, hidden, 0,
                    const_cast<void*>(packed.groups[t]));
    });
    for (int64_t g = 0; g < moe.num_groups; ++g) {
      Group& group = moe.groups[g];
      for (int64_t i = 0; group.gate_up->group == 1 && i < group.count; ++i)
        group.x[i] = packed.groups[group.routes[i] / moe.routes];
    }
  }
  pool.run(num_grouped, [&](int64_t unit, int) {
    const Group& group = *grouped[unit];
    const Matmul& matmul = *group.gate_up;
    for (int64_t i = 0; i < group.count; ++i) {
      matmul.pack(offset(x, group.routes[i] / moe.routes * x_row_bytes), moe.act, 0, hidden, hidden,
                  int(i % matmul.group), const_cast<void*>(group.x[i / matmul.group]));
    }
  });
}

// Adds a matrix' bias to rows [first, first + rows) of each token's product.
void add_bias(const FtdOps& ops, const Matrix& matrix, int64_t first, int64_t rows, float* products,
              int64_t tokens, int64_t stride) {
  for (int64_t t = 0; matrix.bias && t < tokens; ++t)
    ops.kernels.add_scaled(matrix.bias + first, 1.0f, products + t * stride, rows);
}

// Packs rows [first, first + rows) of h, [count, stride] floats, for the down matrix.
void pack_h(const Moe& moe, const Group& group, const float* h, int64_t stride, int64_t first,
            int64_t rows) {
  const int64_t inner = moe.layout.inner;
  for (int64_t i = 0; i < group.count; ++i) {
    group.down->pack(h + i * stride, FTD_F32, first, rows, inner, int(i % group.down->group),
                     const_cast<void*>(group.h[i / group.down->group]));
  }
}

// Rows of one expert's h, for all its tokens.
void gate_up_rows(const Moe& moe, FtdOps& ops, const Unit& unit, Arena& arena) {
  const FtdExpertLayout& layout = moe.layout;
  const Group& group = moe.groups[unit.group];
  const int64_t first = unit.first, rows = unit.rows;
  const int64_t prefetch = ops.prefetch_bytes[layout.gate.format][group.count > 1];
  float* gate = arena.take<float>(size_t(rows * group.count));
  float* up = arena.take<float>(size_t(rows * group.count));
  const Matrix w1(group.record, layout.gate, layout.hidden);
  const Matrix w3(group.record, layout.up, layout.hidden);
  group.gate_up->run({w1, first, rows, group.x, group.count, gate, rows, prefetch});
  group.gate_up->run({w3, first, rows, group.x, group.count, up, rows, prefetch});
  add_bias(ops, w1, first, rows, gate, group.count, rows);
  add_bias(ops, w3, first, rows, up, group.count, rows);
  ops.kernels.gate_up(gate, up, gate, rows * group.count, moe.act, moe.activation);
  for (int64_t i = 0; moe.few && i < group.count; ++i)
    memcpy(group.plain_h + i * layout.inner + first, gate + i * rows, size_t(rows) * sizeof *gate);
  if (!moe.few) pack_h(moe, group, gate, rows, first, rows);
  Progress& progress = *group.progress;
  if (progress.left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  if (moe.few) pack_h(moe, group, group.plain_h, layout.inner, 0, layout.inner);
  progress.ready.store(true, std::memory_order_release);
}

// Until an expert's h is there. Its gate and up rows have been claimed before: somebody is at them.
void wait_for_h(const Group& group, const uint8_t* weights, int64_t bytes) {
  const std::atomic<bool>& ready = group.progress->ready;
  for (int64_t byte = 0; byte < least(bytes, kAheadBytes); byte += 64) {
    if (ready.load(std::memory_order_acquire)) return;
    __builtin_prefetch(weights + byte, 0, 2);
  }
  wait_until([&] { return ready.load(std::memory_order_acquire); });
}

// Rows of one expert's down matrix from ``column`` on: to ``products``, [routes, width] floats, or
// without them to y [T · K, H].
void down_rows(const Moe& moe, FtdOps& ops, const Unit& unit, int64_t column, float* products,
               int64_t width, float* y, Arena& arena) {
  const FtdExpertLayout& layout = moe.layout;
  const Group& group = moe.groups[unit.group];
  const Matrix w2(group.record, layout.down, layout.inner);
  const int64_t first = column + unit.first, rows = unit.rows;
  const int64_t bytes = row_bytes(layout.down.format, layout.inner);
  wait_for_h(group, w2.numbers + first * bytes, rows * bytes);
  float* out;
  int64_t out_stride = width;
  if (products) {
    out = products + group.first * width + unit.first;
  } else if (group.count == 1) {
    out = y + group.routes[0] * layout.hidden + first;
  } else {
    out = arena.take<float>(size_t(rows * group.count));
    out_stride = rows;
  }
  group.down->run({w2, first, rows, group.h, group.count, out, out_stride,
                   ops.prefetch_bytes[layout.down.format][group.count > 1]});
  add_bias(ops, w2, first, rows, out, group.count, out_stride);
  for (int64_t i = 0; !products && group.count > 1 && i < group.count; ++i)
    memcpy(y + group.routes[i] * layout.hidden + first, out + i * rows, size_t(rows) * sizeof *out);
}

// Some columns of one token's y.
void add_routes(const Moe& moe, FtdOps& ops, const float* weights, const float* products,
                int64_t width, int64_t token, int64_t columns, float* y) {
  memset(y, 0, size_t(columns) * sizeof *y);
  for (int64_t r = token * moe.routes; r < (token + 1) * moe.routes; ++r) {
    if (moe.place[r] >= 0)
      ops.kernels.add_scaled(products + moe.place[r] * width, weights[r], y, columns);
  }
}

}  // namespace

extern "C" int32_t ftd_moe(FtdOps* ops, const void* x, int32_t act, const int32_t* ids,
                           const float* weights, const int64_t* address,
                           const FtdExpertLayout* layout, const FtdActivation* activation, float* y,
                           int64_t tokens, int64_t routes, int64_t experts) {
  if (!known(act) || !known_format(layout->gate.format) || !known_format(layout->down.format) ||
      layout->up.format != layout->gate.format)
    return FTD_BAD_TYPE;
  if (tokens < 0 || routes < 0 || experts < 0 || layout->hidden < 1 || layout->inner < 1)
    return FTD_BAD_SHAPE;
  Pool& pool = ops->pool;
  const Turn turn(pool);
  Moe moe = {*layout, *activation, act, tokens, routes, nullptr, nullptr, 0, 0, false};
  if (!group_routes(moe, pool, ids, address, experts)) return FTD_BAD_INDEX;
  pack_inputs(moe, *ops, x);

  const int64_t inner = layout->inner, hidden = layout->hidden;
  const int64_t row_cost = cost_of(moe.num_groups * row_bytes(layout->down.format, inner),
                                   moe.num_routes * inner);  // of a down row of every expert
  // all of y at once, but for many tokens
  const int64_t fitting = kProductFloats / greatest(1, moe.num_routes) / kPackAlign * kPackAlign;
  const int64_t width = weights ? least(hidden, greatest(kPackAlign, fitting)) : hidden;
  float* products = weights ? pool.shared().take<float>(size_t(moe.num_routes * width)) : nullptr;
  for (int64_t column = 0; column < hidden; column += width) {
    const int64_t columns = least(width, hidden - column);
    const Job job = deal_out(moe, pool, column == 0, columns);
    share(
        pool, job.count, (columns + (column ? 0 : 2 * hidden)) * row_cost,
        [&](int64_t number, int thread) {
          const Unit& unit = job.units[number];
          if (unit.stage == Stage::gate_up) {
            gate_up_rows(moe, *ops, unit, pool.fresh(thread));
          } else {
            down_rows(moe, *ops, unit, column, products, width, y, pool.fresh(thread));
          }
        },
        job.ends);
    if (!weights) continue;
    constexpr int64_t kColumns = 512;
    const int64_t strips = (columns + kColumns - 1) / kColumns;
    share(pool, tokens * strips, columns * (moe.num_routes + tokens) * 4, [&](int64_t unit, int) {
      const int64_t token = unit / strips, first = unit % strips * kColumns;
      add_routes(moe, *ops, weights, products + first, width, token,
                 least(kColumns, columns - first), y + token * hidden + column + first);
    });
  }
  return 0;
}
