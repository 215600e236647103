// y[t] = Σ_k weights[t, k] · W2 activation(W1 x[t], W3 x[t]) with the matrices of expert ids[t, k],
// each of which may add a bias.
//
// Routes are sorted by expert, so each distinct expert is read once: 3 · H · I weights. Three jobs:
// gate and up rows of all experts; down rows of all experts; each token's sum over its routes, in
// the order of k whatever expert came first. Without weights there is no sum: each route's part is
// the result, and goes there directly.
//
// Of one expert somebody else may compute a part: then W1 and W3 have their first rows here, and W2
// the columns that go with them. Whoever has the rest adds W2's bias.
#include <string.h>

#include "ops.h"
#include "units.h"

using namespace ftd;

namespace {

// Routes of one expert.
struct Group {
  const uint8_t* record;
  const int32_t* routes;  // t * K + k of each
  int64_t first;          // of them, counted over all experts
  int64_t count;
  int64_t inner;          // rows of W1 and W3 that are computed here: I, or the first of them
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

constexpr int64_t kMostAhead = 128 << 10;    // bytes that wait in a thread's cache for their turn
constexpr int64_t kProductFloats = 4 << 20;  // of down's results before they are added: 16 MiB

// Units of a job, and where each node's end: its experts come first for its threads.
struct Job {
  Unit* units;
  int64_t count;
  int64_t* ends;
};

// So many rows of each group; ``of_h``: of the gate and up matrices, of which some may be computed
// only in part.
Job deal_out(const Moe& moe, Pool& pool, int64_t rows, bool of_h) {
  const FtdExpertLayout& layout = moe.layout;
  const int64_t bytes = of_h ? 2 * row_bytes(layout.gate.format, layout.hidden)
                             : row_bytes(layout.down.format, layout.inner);
  int64_t piece = 1;
  for (int64_t g = 0; g < moe.num_groups; ++g)
    piece = greatest(piece, greatest(moe.groups[g].gate_up->piece, moe.groups[g].down->piece));
  const Deal deal(moe.num_groups, rows, pool.threads(), piece, bytes);
  Job job = {pool.shared().take<Unit>(size_t(deal.most_units())), 0,
             pool.shared().take<int64_t>(size_t(pool.nodes()))};
  Unit* end = job.units;
  for (int64_t node = 0, g = 0; node < pool.nodes(); ++node) {
    for (; g < moe.num_groups && moe.groups[g].node == node; ++g)
      end = deal.out(end, g, of_h ? moe.groups[g].inner : rows);
    job.ends[node] = end - job.units;
  }
  job.count = end - job.units;
  return job;
}

// Sorts routes by expert. False where an id is out of range.
bool group_routes(Moe& moe, Pool& pool, const int32_t* ids, const int64_t* address, int64_t experts,
                  const Part& part) {
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
      group.inner = e == part.expert ? part.inner : moe.layout.inner;
      group.node = node;
    }
  }
  return true;
}

// Packs x: once for all experts where tokens lie singly, expert by expert where they lie in groups.
void pack_inputs(Moe& moe, FtdOps& ops, const void* x) {
  Pool& pool = ops.pool;
  const int64_t hidden = moe.layout.hidden;
  const Matmul& single = *ops.kernels.matmul[moe.layout.gate.format][moe.act];
  const int64_t x_row_bytes = hidden * type_bytes(moe.act);
  bool any_single = false;
  int64_t num_grouped = 0;
  Group** grouped = pool.shared().take<Group*>(size_t(moe.num_groups));
  for (int64_t g = 0; g < moe.num_groups; ++g) {
    Group& group = moe.groups[g];
    group.gate_up = &choose(ops.kernels, moe.layout.gate.format, moe.act, group.count);
    const bool whole = group.inner == moe.layout.inner;  // else W2 is multiplied row by row
    group.down = &choose(ops.kernels, moe.layout.down.format, moe.act, whole ? group.count : 1);
    group.h = packed_groups(pool.shared(), *group.down, group.count, group.inner).groups;
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

// Asks for the first scales of rows that are multiplied soon.
void announce_scales(const Matrix& m, int64_t first_row) {
  const int64_t bytes = scale_bytes(m.format, m.inputs);
  const uint8_t* from = m.scales + first_row / scale_rows(m.format) * bytes;
  for (int64_t at = 0; at < least(4 * bytes, 256); at += 64) __builtin_prefetch(from + at, 0, 2);
}

// Rows of one expert's h, for all its tokens. next: what this thread most likely does then, or
// null.
void gate_up_rows(const Moe& moe, FtdOps& ops, const Unit& unit, const Unit* next, Arena& arena) {
  const FtdExpertLayout& layout = moe.layout;
  const Group& group = moe.groups[unit.group];
  const int64_t first = unit.first, rows = unit.rows;
  const int64_t prefetch = ops.prefetch_bytes[layout.gate.format][group.count > 1];
  float* gate = arena.take<float>(size_t(rows * group.count));
  float* up = arena.take<float>(size_t(rows * group.count));
  const Matrix w1(group.record, layout.gate, layout.hidden);
  const Matrix w3(group.record, layout.up, layout.hidden);
  MatmulCall by_w1(w1, first, rows, group.x, group.count, gate, rows, prefetch);
  MatmulCall by_w3(w3, first, rows, group.x, group.count, up, rows, prefetch);
  by_w1.then = by_w3.weight;
  by_w3.announced = true;
  announce_scales(w3, first);
  if (next) {
    const Matrix after(moe.groups[next->group].record, layout.gate, layout.hidden);
    by_w3.then = after.numbers + next->first * row_bytes(after.format, after.inputs);
    announce_scales(after, next->first);
  }
  group.gate_up->run(by_w1);
  group.gate_up->run(by_w3);
  add_bias(ops, w1, first, rows, gate, group.count, rows);
  add_bias(ops, w3, first, rows, up, group.count, rows);
  ops.kernels.gate_up(gate, up, gate, rows * group.count, moe.act, moe.activation);
  for (int64_t i = 0; i < group.count; ++i) {
    group.down->pack(gate + i * rows, FTD_F32, first, rows, group.inner, int(i % group.down->group),
                     const_cast<void*>(group.h[i / group.down->group]));
  }
}

// The first ``group.inner`` inputs of rows: one by one, as they do not follow each other in memory.
// known: rows up to here are this thread's, most likely.
void part_of_rows(const Group& group, const Matrix& w2, int64_t first, int64_t rows, int64_t known,
                  float* out, int64_t out_stride, int64_t prefetch) {
  const int64_t bytes = row_bytes(w2.format, w2.inputs), used = row_bytes(w2.format, group.inner);
  const int64_t ahead = greatest(1, prefetch / used);
  for (int64_t row = first; row < first + rows; ++row) {
    const uint8_t* next = w2.numbers + (row + ahead) * bytes;
    for (int64_t byte = 0; row + ahead < known && byte < used; byte += 64)
      __builtin_prefetch(next + byte, 0, 2);
    Matrix part = w2;
    part.inputs = group.inner;
    part.numbers += row * bytes;
    part.scales += row / scale_rows(w2.format) * scale_bytes(w2.format, w2.inputs);
    group.down->run({part, 0, 1, group.h, group.count, out + (row - first), out_stride, 0});
  }
}

// Rows of one expert's down matrix from ``column`` on: to ``products``, [routes, width] floats, or
// without them to y [T · K, H].
void down_rows(const Moe& moe, FtdOps& ops, const Unit& unit, const Unit* next, int64_t column,
               float* products, int64_t width, float* y, Arena& arena) {
  const FtdExpertLayout& layout = moe.layout;
  const Group& group = moe.groups[unit.group];
  const Matrix w2(group.record, layout.down, layout.inner);
  const int64_t first = column + unit.first, rows = unit.rows;
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
  const int64_t prefetch = ops.prefetch_bytes[layout.down.format][group.count > 1];
  if (group.inner == layout.inner) {
    MatmulCall by_w2(w2, first, rows, group.h, group.count, out, out_stride, prefetch);
    if (next) {
      const Matrix after(moe.groups[next->group].record, layout.down, layout.inner);
      const int64_t row = column + next->first;
      by_w2.then = after.numbers + row * row_bytes(after.format, after.inputs);
      announce_scales(after, row);
    }
    group.down->run(by_w2);
    add_bias(ops, w2, first, rows, out, group.count, out_stride);
  } else {
    const Unit& last = next && next->group == unit.group ? *next : unit;
    part_of_rows(group, w2, first, rows, column + last.first + last.rows, out, out_stride,
                 prefetch);
  }
  for (int64_t i = 0; !products && group.count > 1 && i < group.count; ++i)
    memcpy(y + group.routes[i] * layout.hidden + first, out + i * rows, size_t(rows) * sizeof *out);
}

// What each thread reads first of the down matrices: the rows of its run that belong to one expert.
const Pool::Ahead* first_of_down(const Moe& moe, Pool& pool, const Job& down) {
  Pool::Run* runs = pool.shared().take<Pool::Run>(size_t(pool.threads()));
  Pool::Ahead* ahead = pool.shared().take<Pool::Ahead>(size_t(pool.threads()));
  pool.deal(down.count, down.ends, runs);
  for (int t = 0; t < pool.threads(); ++t) {
    ahead[t] = {};
    if (runs[t].first == runs[t].end) continue;
    const Unit& unit = down.units[runs[t].first];
    const Group& group = moe.groups[unit.group];
    const Matrix w2(group.record, moe.layout.down, moe.layout.inner);
    ahead[t].stride = row_bytes(w2.format, w2.inputs);
    ahead[t].from = reinterpret_cast<const char*>(w2.numbers) + unit.first * ahead[t].stride;
    ahead[t].bytes = row_bytes(w2.format, group.inner);
    for (int64_t u = runs[t].first; u < runs[t].end && down.units[u].group == unit.group; ++u)
      ahead[t].pieces += down.units[u].rows;
    ahead[t].pieces = least(ahead[t].pieces, kMostAhead / ahead[t].bytes);
  }
  return ahead;
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

int32_t ftd::moe(FtdOps* ops, const void* x, int32_t act, const int32_t* ids, const float* weights,
                 const int64_t* address, const FtdExpertLayout* layout,
                 const FtdActivation* activation, float* y, int64_t tokens, int64_t routes,
                 int64_t experts, const Part& part) {
  if (!known(act) || !known_format(layout->gate.format) || !known_format(layout->down.format) ||
      layout->up.format != layout->gate.format)
    return FTD_BAD_TYPE;
  if (tokens < 0 || routes < 0 || experts < 0 || layout->hidden < 1 || layout->inner < 1 ||
      (part.expert >= 0 && (part.inner < 1 || part.inner > layout->inner)))
    return FTD_BAD_SHAPE;
  Pool& pool = ops->pool;
  const Turn turn(pool);
  Moe moe = {*layout, *activation, act, tokens, routes, nullptr, nullptr, 0, 0};
  if (!group_routes(moe, pool, ids, address, experts, part)) return FTD_BAD_INDEX;
  pack_inputs(moe, *ops, x);

  const int64_t inner = layout->inner, hidden = layout->hidden;
  const int64_t row_cost = cost_of(moe.num_groups * row_bytes(layout->down.format, inner),
                                   moe.num_routes * inner);  // of a down row of every expert
  // all of y at once, but for many tokens
  const int64_t fitting = kProductFloats / greatest(1, moe.num_routes) / kPackAlign * kPackAlign;
  const int64_t width = weights ? least(hidden, greatest(kPackAlign, fitting)) : hidden;
  float* products = weights ? pool.shared().take<float>(size_t(moe.num_routes * width)) : nullptr;
  const Job up = deal_out(moe, pool, inner, true);
  const Job first_down = deal_out(moe, pool, width, false);
  share(
      pool, up.count, 2 * hidden * row_cost,
      [&](int64_t unit, int64_t next, int thread) {
        gate_up_rows(moe, *ops, up.units[unit], next < 0 ? nullptr : up.units + next,
                     pool.fresh(thread));
      },
      up.ends, first_of_down(moe, pool, first_down));
  for (int64_t column = 0; column < hidden; column += width) {
    const int64_t columns = least(width, hidden - column);
    const Job down = column ? deal_out(moe, pool, columns, false) : first_down;
    share(
        pool, down.count, columns * row_cost,
        [&](int64_t unit, int64_t next, int thread) {
          down_rows(moe, *ops, down.units[unit], next < 0 ? nullptr : down.units + next, column,
                    products, width, y, pool.fresh(thread));
        },
        down.ends);
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

extern "C" int32_t ftd_moe(FtdOps* ops, const void* x, int32_t act, const int32_t* ids,
                           const float* weights, const int64_t* address,
                           const FtdExpertLayout* layout, const FtdActivation* activation, float* y,
                           int64_t tokens, int64_t routes, int64_t experts) {
  return moe(ops, x, act, ids, weights, address, layout, activation, y, tokens, routes, experts,
             {});
}
