// Tiles as scaled_amx.cpp uses them, which includes this within its namespace.

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
template <int kSum, int kWeights>  // tokens in 6 for even sums, in 7 for odd ones
void multiply_tiles() {
  if constexpr (kSum == 0) {
    _tile_zero(0);
    if constexpr (kWeights == 4) _tile_dpbf16ps(0, 4, 6);
    if constexpr (kWeights == 5) _tile_dpbf16ps(0, 5, 6);
  } else if constexpr (kSum == 1) {
    _tile_zero(1);
    if constexpr (kWeights == 4) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kWeights == 5) _tile_dpbf16ps(1, 5, 7);
  } else if constexpr (kSum == 2) {
    _tile_zero(2);
    if constexpr (kWeights == 4) _tile_dpbf16ps(2, 4, 6);
    if constexpr (kWeights == 5) _tile_dpbf16ps(2, 5, 6);
  } else {
    _tile_zero(3);
    if constexpr (kWeights == 4) _tile_dpbf16ps(3, 4, 7);
    if constexpr (kWeights == 5) _tile_dpbf16ps(3, 5, 7);
  }
}
