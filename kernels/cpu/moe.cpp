// y[t] = Σ_k weights[t, k] · W2 activation(W1 x[t], W3 x[t]) with the matrices of expert ids[t, k],
// each of which may add a bias.
//
// Routes are sorted by expert, so each distinct expert is read once: 3 · H · I weights. Three jobs:
// gate and up rows of all experts; down rows of all experts; each token's sum over its routes, in
// the order of k whatever expert came first. Without weights there is no sum: each route's part is
// the result.
#include <string.h>

#include "ops.h"

using namespace ftd;

namespace {

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
};

constexpr int64_t kProductFloats = 4 << 20;  // of down's results before they are added: 16 MiB

// A matrix of every group, cut into units of rows.
struct Units {
  int64_t rows;       // of a unit
  int64_t per_group;  // units
  int64_t count;      // of all groups

  // A dozen units a thread end together, more or less; below 32 rows reading suffers.
  Units(int64_t matrix_rows, const Moe& moe, int threads) {
    const int64_t wanted = matrix_rows * moe.num_groups / (12 * threads) / kPackAlign * kPackAlign;
    rows = greatest(kPackAlign, least(8 * kPackAlign, wanted));
    per_group = (matrix_rows + rows - 1) / rows;
    count = per_group * moe.num_groups;
  }
  const Group& group(const Moe& moe, int64_t unit) const { return moe.groups[unit / per_group]; }
  int64_t first_row(int64_t unit) const { return unit % per_group * rows; }
};

// Where each node's units end: its experts come first for its threads.
const int64_t* node_ends(const Moe& moe, Pool& pool, const Units& units) {
  int64_t* ends = pool.shared().take<int64_t>(size_t(pool.nodes()));
  for (int64_t node = 0, g = 0; node < pool.nodes(); ++node) {
    while (g < moe.num_groups && moe.groups[g].node == node) ++g;
    ends[node] = g * units.per_group;
  }
  return ends;
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
      group.node = node;
    }
  }
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
    split(pool, moe.tokens, 1, hidden * 4, [&](int64_t first, int64_t last, int) {
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

// First job: h rows [first, last) of one expert, for all its tokens, packed for the down matrix.
void gate_up_rows(const Moe& moe, FtdOps& ops, const Group& group, int64_t first, int64_t last,
                  Arena& arena) {
  const FtdExpertLayout& layout = moe.layout;
  const int64_t rows = last - first;
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
  for (int64_t i = 0; i < group.count; ++i) {
    group.down->pack(gate + i * rows, FTD_F32, first, rows, layout.inner,
                     int(i % group.down->group), const_cast<void*>(group.h[i / group.down->group]));
  }
}

// Second job: rows [first, last) of one expert's down matrix; products has [routes, width] floats.
void down_rows(const Moe& moe, FtdOps& ops, const Group& group, int64_t first, int64_t last,
               float* products, int64_t width) {
  const FtdExpertLayout& layout = moe.layout;
  const Matrix w2(group.record, layout.down, layout.inner);
  float* out = products + group.first * width;
  group.down->run({w2, first, last - first, group.h, group.count, out, width,
                   ops.prefetch_bytes[layout.down.format][group.count > 1]});
  add_bias(ops, w2, first, last - first, out, group.count, width);
}

// Third job: some columns of one token's y.
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
  Moe moe = {*layout, *activation, act, tokens, routes, nullptr, nullptr, 0, 0};
  if (!group_routes(moe, pool, ids, address, experts)) return FTD_BAD_INDEX;
  pack_inputs(moe, *ops, x);

  const int64_t inner = layout->inner, hidden = layout->hidden;
  const int64_t row_cost = cost_of(moe.num_groups * row_bytes(layout->down.format, inner),
                                   moe.num_routes * inner);  // of a down row of every expert
  const Units up(inner, moe, pool.threads());
  share(
      pool, up.count, 2 * hidden * row_cost,
      [&](int64_t unit, int thread) {
        const int64_t first = up.first_row(unit);
        gate_up_rows(moe, *ops, up.group(moe, unit), first, least(inner, first + up.rows),
                     pool.fresh(thread));
      },
      node_ends(moe, pool, up));

  // all of y at once, but for many tokens
  const int64_t fitting = kProductFloats / greatest(1, moe.num_routes) / kPackAlign * kPackAlign;
  const int64_t width = least(hidden, greatest(kPackAlign, fitting));
  float* products = pool.shared().take<float>(size_t(moe.num_routes * width));
  for (int64_t column = 0; column < hidden; column += width) {
    const int64_t columns = least(width, hidden - column);
    const Units down(columns, moe, pool.threads());
    share(
        pool, down.count, columns * row_cost,
        [&](int64_t unit, int) {
          const int64_t first = down.first_row(unit);
          down_rows(moe, *ops, down.group(moe, unit), column + first,
                    column + least(columns, first + down.rows), products + first, width);
        },
        node_ends(moe, pool, down));
    if (!weights) {
      split(pool, tokens * routes, 1, 8 * columns, [&](int64_t first, int64_t last, int) {
        for (int64_t r = first; r < last; ++r) {
          if (moe.place[r] >= 0)
            memcpy(y + r * hidden + column, products + moe.place[r] * width,
                   size_t(columns) * sizeof *y);
        }
      });
      continue;
    }
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
