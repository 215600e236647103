// y[t] = Σ_k weights[t, k] · W2 (silu(W1 x[t]) ⊙ W3 x[t]) with the matrices of expert ids[t, k].
//
// Routes are sorted by expert, so each distinct expert is read once: 3 · H · I weights. Two jobs:
// gate and up rows of all experts, then down rows; between them lies the only barrier. A unit of
// the second job owns its rows of y: it adds a token's routes in the order of k, whatever expert
// came first.
#include <string.h>

#include "ops.h"

using namespace ftd;

namespace {

// Routes of one expert.
struct Group {
  const uint8_t* record;
  const int32_t* routes;  // t * K + k of each
  int64_t count;
  const Matmul* gate_up;  // how its tokens are multiplied by W1 and W3 ...
  const Matmul* down;     // ... and W2
  const void** x;         // packed, for gate_up
  const void** h;         // packed, for down
  int node;
};

struct Moe {
  const FtdExpertLayout& layout;
  int act;
  int64_t tokens, routes;
  Group* groups;  // by node, then by expert
  int64_t num_groups;
  int64_t num_routes;
};

constexpr int64_t kDownFloats = 1 << 18;  // of products a thread holds before they are added: 1 MiB

// Rows of a matrix that one unit computes: 64 or 128, so that each thread gets some eight units.
int64_t unit_rows(int64_t rows, int64_t groups, int threads) {
  return rows * groups < 8 * threads * 2 * kPackAlign ? kPackAlign : 2 * kPackAlign;
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
  for (int64_t r = 0; r < all; ++r) {
    if (ids[r] >= 0) sorted[next[ids[r]]++] = int32_t(r);
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
  const Matmul& single = *ops.kernels.matmul[moe.layout.format][moe.act];
  const int64_t x_row_bytes = hidden * type_bytes(moe.act);
  bool any_single = false;
  int64_t num_grouped = 0;
  Group** grouped = pool.shared().take<Group*>(size_t(moe.num_groups));
  for (int64_t g = 0; g < moe.num_groups; ++g) {
    Group& group = moe.groups[g];
    group.gate_up = group.down = &choose(ops.kernels, moe.layout.format, moe.act, group.count);
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

// First job: h rows [first, last) of one expert, for all its tokens, packed for the down matrix.
void gate_up_rows(const Moe& moe, FtdOps& ops, const Group& group, int64_t first, int64_t last,
                  Arena& arena) {
  const FtdExpertLayout& layout = moe.layout;
  const int64_t rows = last - first, row_bytes = layout.hidden * type_bytes(layout.format);
  const int64_t prefetch = ops.prefetch_bytes[layout.format][group.count > 1];
  float* gate = arena.take<float>(size_t(rows * group.count));
  float* up = arena.take<float>(size_t(rows * group.count));
  const uint8_t* w1 = group.record + layout.gate + first * row_bytes;
  const uint8_t* w3 = group.record + layout.up + first * row_bytes;
  group.gate_up->run({w1, layout.hidden, rows, group.x, group.count, gate, rows, prefetch});
  group.gate_up->run({w3, layout.hidden, rows, group.x, group.count, up, rows, prefetch});
  ops.kernels.gate_up(gate, up, gate, rows * group.count, moe.act);
  for (int64_t i = 0; i < group.count; ++i) {
    group.down->pack(gate + i * rows, FTD_F32, first, rows, layout.inner,
                     int(i % group.down->group), const_cast<void*>(group.h[i / group.down->group]));
  }
}

// Second job: rows [first, last) of y, all experts.
void down_rows(const Moe& moe, FtdOps& ops, const float* weights, float* y, int64_t first,
               int64_t last, Arena& arena) {
  const FtdExpertLayout& layout = moe.layout;
  const int64_t rows = last - first, row_bytes = layout.inner * type_bytes(layout.format);
  float* products = arena.take<float>(size_t(rows * moe.num_routes));
  const float** of_route = arena.take<const float*>(size_t(moe.tokens * moe.routes));
  memset(of_route, 0, size_t(moe.tokens * moe.routes) * sizeof *of_route);
  float* out = products;
  for (int64_t g = 0; g < moe.num_groups; ++g) {
    const Group& group = moe.groups[g];
    group.down->run({group.record + layout.down + first * row_bytes, layout.inner, rows, group.h,
                     group.count, out, rows, ops.prefetch_bytes[layout.format][group.count > 1]});
    for (int64_t i = 0; i < group.count; ++i, out += rows) of_route[group.routes[i]] = out;
  }
  for (int64_t t = 0; t < moe.tokens; ++t) {
    float* to = y + t * layout.hidden + first;
    memset(to, 0, size_t(rows) * sizeof *to);
    for (int64_t k = 0; k < moe.routes; ++k) {
      const float* product = of_route[t * moe.routes + k];
      if (product) ops.kernels.add_scaled(product, weights[t * moe.routes + k], to, rows);
    }
  }
}

}  // namespace

extern "C" int32_t ftd_moe(FtdOps* ops, const void* x, int32_t act, const int32_t* ids,
                           const float* weights, const int64_t* address,
                           const FtdExpertLayout* layout, float* y, int64_t tokens, int64_t routes,
                           int64_t experts) {
  if (!known(act) || !known(layout->format)) return FTD_BAD_TYPE;
  if (tokens < 0 || routes < 0 || experts < 0 || layout->hidden < 1 || layout->inner < 1)
    return FTD_BAD_SHAPE;
  Pool& pool = ops->pool;
  const Turn turn(pool);
  Moe moe = {*layout, act, tokens, routes, nullptr, 0, 0};
  if (!group_routes(moe, pool, ids, address, experts)) return FTD_BAD_INDEX;
  pack_inputs(moe, *ops, x);

  const int64_t inner = layout->inner, hidden = layout->hidden;
  const int64_t rows1 = unit_rows(inner, moe.num_groups, pool.threads());
  const int64_t units1 = (inner + rows1 - 1) / rows1;  // of an expert
  int64_t* ends = pool.shared().take<int64_t>(size_t(pool.nodes()));
  for (int node = 0, g = 0; node < pool.nodes(); ++node) {
    while (g < moe.num_groups && moe.groups[g].node == node) ++g;
    ends[node] = g * units1;
  }
  const int64_t matrix_bytes = inner * hidden * type_bytes(layout->format);
  const int64_t down_cost = cost_of(moe.num_groups * matrix_bytes, moe.num_routes * inner * hidden);
  share(
      pool, moe.num_groups * units1, 2 * down_cost,
      [&](int64_t unit, int thread) {
        const int64_t first = unit % units1 * rows1;
        gate_up_rows(moe, *ops, moe.groups[unit / units1], first, least(inner, first + rows1),
                     pool.fresh(thread));
      },
      ends);

  const int64_t fitting = kDownFloats / greatest(1, moe.num_routes) / 16 * 16;
  const int64_t rows2 =
      greatest(16, least(fitting, unit_rows(hidden, moe.num_groups, pool.threads())));
  share(pool, (hidden + rows2 - 1) / rows2, down_cost, [&](int64_t unit, int thread) {
    down_rows(moe, *ops, weights, y, unit * rows2, least(hidden, (unit + 1) * rows2),
              pool.fresh(thread));
  });
  return 0;
}
