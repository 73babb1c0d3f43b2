// decode/forward_latent.cu: how K's columns are divided, and SharedPlan.
#pragma once
#include "decode/row_tile.cuh"
#include "sm90/wide_heads.cuh"

constexpr int THREADS = 4 * WARPGROUP;
constexpr int S_COUNT = BLOCK_K / 2, P_COUNT = BLOCK_K / 4; // of a thread of the score warpgroup

// Columns of O that a value warpgroup sums.
constexpr int LEFT_COLUMNS = left_columns(HEAD_DIM_V), RIGHT_COLUMNS = HEAD_DIM_V - LEFT_COLUMNS;

// A key tile has panels of 64 columns; the first ones are V, too.
constexpr int PANELS = num_panels(HEAD_DIM), VALUE_PANELS = num_panels(HEAD_DIM_V);
constexpr int PANEL_BYTES = BLOCK_K * PANEL_ROW_BYTES;

static_assert(BLOCK_Q == WGMMA_M && BLOCK_K == 64, "P is one panel of 64 rows");
static_assert(HEAD_DIM % PANEL_COLUMNS == 0 && HEAD_DIM_V % PANEL_COLUMNS == 0, "whole panels");
static_assert(HEAD_DIM <= 576 && HEAD_DIM_V >= 128 && HEAD_DIM_V <= 512,
              "halves of 64 to 256 columns");
static_assert(HEAD_DIM_V <= HEAD_DIM, "values are columns of keys");

// The panel that is loaded, and summed over for S, as i-th: V's two halves give their stages back
// in this order, two panels of each at a time.
constexpr int panel_at(int i) {
    constexpr int LEFT = LEFT_COLUMNS / PANEL_COLUMNS;
    if (VALUE_PANELS != 2 * LEFT || LEFT % 2 != 0 || i >= VALUE_PANELS) return i;
    return i / 4 * 2 + i / 2 % 2 * LEFT + i % 2;
}

// A key tile, and P of it. Where the last panel is no values it is free once S has been computed:
// P takes its place.
constexpr bool P_IN_KEYS = VALUE_PANELS < PANELS;
template <bool IN_KEYS> struct KeyStageOf {
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_Q, BLOCK_K> own_p;
    __device__ __forceinline__ u32 p() const { return shared_address(&own_p); }
};
template <> struct KeyStageOf<true> {
    SmemTile<BLOCK_K, HEAD_DIM> k;
    __device__ __forceinline__ u32 p() const {
        return shared_address(&k) + (PANELS - 1) * PANEL_BYTES;
    }
};
using KeyStage = KeyStageOf<P_IN_KEYS>;

// What comes with P: the factors of acc's rows before P V is added; with a part's last key tile
// the rows' maxima, in natural units, and sums.
struct RowFactors { float rescale[BLOCK_Q], m[BLOCK_Q], l[BLOCK_Q]; };

// A part and the key tiles that its row tile sees of it. part.count = 0: there is none left.
struct Work {
    Part part;
    TileRange tiles;
};
constexpr int WORKS = 2;

constexpr int TILE_WARPS = 2;                               // that load a tile

struct SharedPlan {
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    KeyStage stages[KV_STAGES];
    RowFactors factors[KV_STAGES];
    u64 full[KV_STAGES * PANELS], empty[KV_STAGES * PANELS], p_full[KV_STAGES];
    u64 work_full[WORKS], work_empty[WORKS];
    Work works[WORKS];

    // Once, by one thread. full: each warp that loads a tile arrives. empty: each value warp.
    // p_full: each score warp. work_full: a producer warp; work_empty: each warp of other roles.
    __device__ __forceinline__ void init_barriers() {
        for (int i = 0; i < KV_STAGES * PANELS; ++i) {
            mbarrier_init(shared_address(&full[i]), TILE_WARPS);
            mbarrier_init(shared_address(&empty[i]), 2 * ROLE_WARPS);
        }
        for (u64& barrier : p_full) mbarrier_init(shared_address(&barrier), ROLE_WARPS);
        for (int i = 0; i < WORKS; ++i) {
            mbarrier_init(shared_address(&work_full[i]), 1);
            mbarrier_init(shared_address(&work_empty[i]), 3 * ROLE_WARPS);
        }
        fence_mbarrier_init();
    }
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");
