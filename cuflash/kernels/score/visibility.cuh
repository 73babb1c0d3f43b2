// How much of a tile of (query, key) pairs is visible. The numbers are those of tile flags
// (prepare/tile_flags.cu).
#pragma once

enum class Visibility { NONE, PARTLY, ALL };
