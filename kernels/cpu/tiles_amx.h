// Tiles as scaled_amx.cpp and exact_amx.cpp use them, which include this within their namespaces.

constexpr int kRows = 16;        // of a tile
constexpr int kTileInputs = 32;  // of the left tile
constexpr int kTileBytes = 1024;
constexpr int kTiles = 4;  // left tiles of a chunk
constexpr int kChunk = kTiles * kTileInputs;

// Tiles 0..3 hold sums, 4 and 5 weights, 6 and 7 tokens.
template <int kLanes>
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {kLanes * 4, kLanes * 4, kLanes * 4, kLanes * 4,
                            64,         64,         kLanes * 4, kLanes * 4};
  uint8_t rows[16] = {kRows, kRows, kRows, kRows, kRows, kRows, kRows, kRows};
};

// The instructions take the numbers of tiles as literals only.
template <int kTile>
void load_tile(const void* from, int64_t stride) {
  if constexpr (kTile == 4) _tile_loadd(4, from, stride);
  if constexpr (kTile == 5) _tile_loadd(5, from, stride);
  if constexpr (kTile == 6) _tile_loadd(6, from, stride);
  if constexpr (kTile == 7) _tile_loadd(7, from, stride);
}
template <int kSum>
void store_tile(float* to, int64_t stride) {
  if constexpr (kSum == 0) _tile_stored(0, to, stride);
  if constexpr (kSum == 1) _tile_stored(1, to, stride);
  if constexpr (kSum == 2) _tile_stored(2, to, stride);
  if constexpr (kSum == 3) _tile_stored(3, to, stride);
}
template <int kSum>
void zero_tile() {
  if constexpr (kSum == 0) _tile_zero(0);
  if constexpr (kSum == 1) _tile_zero(1);
  if constexpr (kSum == 2) _tile_zero(2);
  if constexpr (kSum == 3) _tile_zero(3);
}
template <int kSum, int kWeights, int kTokens>
void multiply_tiles() {
  constexpr int kCase = 4 * kSum + 2 * (kWeights - 4) + kTokens - 6;
  if constexpr (kCase == 0) _tile_dpbf16ps(0, 4, 6);
  if constexpr (kCase == 1) _tile_dpbf16ps(0, 4, 7);
  if constexpr (kCase == 2) _tile_dpbf16ps(0, 5, 6);
  if constexpr (kCase == 3) _tile_dpbf16ps(0, 5, 7);
  if constexpr (kCase == 4) _tile_dpbf16ps(1, 4, 6);
  if constexpr (kCase == 5) _tile_dpbf16ps(1, 4, 7);
  if constexpr (kCase == 6) _tile_dpbf16ps(1, 5, 6);
  if constexpr (kCase == 7) _tile_dpbf16ps(1, 5, 7);
  if constexpr (kCase == 8) _tile_dpbf16ps(2, 4, 6);
  if constexpr (kCase == 9) _tile_dpbf16ps(2, 4, 7);
  if constexpr (kCase == 10) _tile_dpbf16ps(2, 5, 6);
  if constexpr (kCase == 11) _tile_dpbf16ps(2, 5, 7);
  if constexpr (kCase == 12) _tile_dpbf16ps(3, 4, 6);
  if constexpr (kCase == 13) _tile_dpbf16ps(3, 4, 7);
  if constexpr (kCase == 14) _tile_dpbf16ps(3, 5, 6);
  if constexpr (kCase == 15) _tile_dpbf16ps(3, 5, 7);
}
