// Which tile of which head a block takes. The grid is one-dimensional: blockIdx.x counts tiles of
// all (batch, head) pairs, section by section. A section is heads_per_section pairs, as many as
// have what their blocks read in L2 at once. Within it come first the pairs' tiles 0, then their
// tiles 1, and so on: where tiles differ in length, a kernel numbers the longest first.
#pragma once
#include "types.cuh"

struct TileOfHead { int tile, head, batch; };

inline TileOfHead tile_of_block(
    int block, int num_tiles, int num_heads, int batch, Schedule schedule) {
    const int section_blocks = schedule.heads_per_section * num_tiles;
    const int section = block / section_blocks, rest = block % section_blocks;
    const int first_pair = section * schedule.heads_per_section;
    const int pairs = min(schedule.heads_per_section, batch * num_heads - first_pair);
    const int pair = first_pair + rest % pairs;
    return {rest / pairs, pair % num_heads, pair / num_heads};
}
