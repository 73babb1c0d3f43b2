// Which tile of which head a block takes. The grid is one-dimensional: blockIdx.x counts tiles of all
// (batch, head) pairs, section by section. Within a section of heads_per_section pairs every pair's
// first tile comes first, then every pair's second, so what those pairs read together stays in L2,
// and the order of tiles is the order of launch (longest first, for causal masks).
#pragma once
#include "types.cuh"

struct TileOfHead { int tile, head, batch; };

inline TileOfHead tile_of_block(int block, int num_tiles, int num_heads, int batch, Schedule schedule) {
    const int section_blocks = schedule.heads_per_section * num_tiles;
    const int section = block / section_blocks, rest = block % section_blocks;
    const int first_pair = section * schedule.heads_per_section;
    const int pairs = min(schedule.heads_per_section, batch * num_heads - first_pair);
    const int pair = first_pair + rest % pairs;
    return {rest / pairs, pair % num_heads, pair / num_heads};
}
