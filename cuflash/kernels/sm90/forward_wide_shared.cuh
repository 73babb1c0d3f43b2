// forward_wide.cu: how the head dimensions are divided, and SharedPlan.
#pragma once
#include "sm90/forward_work.cuh"

// Columns of O that a value warpgroup sums: whole panels, the left half first.
constexpr int V_PANELS = HEAD_DIM_V / PANEL_COLUMNS;
constexpr int LEFT_COLUMNS = (V_PANELS + 1) / 2 * PANEL_COLUMNS;
constexpr int RIGHT_COLUMNS = HEAD_DIM_V - LEFT_COLUMNS;

// Columns of K, or of a half of V, that are loaded at a time. ptxas refuses an MMA of 256 columns
// in a kernel of 512 threads, which starts with 128 registers for each.
constexpr int K_COLUMNS = PANEL_COLUMNS * (HEAD_DIM / PANEL_COLUMNS % 2 == 0 ? 2 : 1);
constexpr int K_CHUNKS = HEAD_DIM / K_COLUMNS;
constexpr int chunk_columns(int columns) { return columns > 192 ? 128 : columns; }

constexpr int P_STAGES = 2;
constexpr int ROLE_WARPS = WARPGROUP / 32;

static_assert(BLOCK_Q == WGMMA_M && Q_STAGES == 1, "a warpgroup's MMA has 64 rows");
static_assert(HEAD_DIM % PANEL_COLUMNS == 0 && HEAD_DIM <= 576, "whole panels");
static_assert(HEAD_DIM_V % PANEL_COLUMNS == 0, "whole panels");
static_assert(HEAD_DIM_V >= 128 && HEAD_DIM_V <= 512, "halves of up to 256 columns");
static_assert(!SPARSE_TILES, "the key tiles of a query tile follow from its position");
static_assert(RUN_TILES == 0, "one sum of all keys");

// Stages of one half of V: BLOCK_K keys and some of the half's columns each.
template <int COLUMNS> struct ValueRing {
    static constexpr int CHUNK = chunk_columns(COLUMNS), CHUNKS = COLUMNS / CHUNK;
    SmemTile<BLOCK_K, CHUNK> stages[STAGES];
};

struct ValueBarriers {
    u64 full[STAGES], empty[STAGES];
};

// What comes with P of a key tile: the factors of acc's rows before P V is added and, with a query
// tile's last key tile, those in the end.
struct RowFactors { float rescale[BLOCK_Q], inverse[BLOCK_Q]; };

struct SharedPlan {
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    SmemTile<BLOCK_Q, BLOCK_K> p[P_STAGES];
    SmemTile<BLOCK_K, K_COLUMNS> k[KV_STAGES];
    ValueRing<LEFT_COLUMNS> v_left;
    ValueRing<RIGHT_COLUMNS> v_right;
    RowFactors factors[P_STAGES];
    u64 q_full[1], q_empty[1], p_full[P_STAGES], p_empty[P_STAGES];
    u64 k_full[KV_STAGES], k_empty[KV_STAGES];
    ValueBarriers v_barriers[2];                            // of the left half, of the right one
    WorkTiles work_tiles;
    int inexact[2][ROLE_WARPS];                             // of a half, whether a warp marked rows

    __device__ __forceinline__ u32 q_stage(int) { return shared_address(&q); }

    // Once, by one thread. full: a producer thread arrives and the TMA unit adds a chunk's bytes;
    // p_full: each score warp arrives. empty: each warp that reads arrives. q_empty: the score
    // warps after their last read of Q, the value warps after their read of the work tile.
    __device__ __forceinline__ void init_barriers() {
        mbarrier_init(shared_address(q_full), 1);
        mbarrier_init(shared_address(q_empty), 3 * ROLE_WARPS);
        for (int i = 0; i < P_STAGES; ++i) {
            mbarrier_init(shared_address(&p_full[i]), ROLE_WARPS);
            mbarrier_init(shared_address(&p_empty[i]), 2 * ROLE_WARPS);
        }
        for (int i = 0; i < KV_STAGES; ++i) {
            mbarrier_init(shared_address(&k_full[i]), 1);
            mbarrier_init(shared_address(&k_empty[i]), ROLE_WARPS);
        }
        for (ValueBarriers& half : v_barriers)
            for (int i = 0; i < STAGES; ++i) {
                mbarrier_init(shared_address(&half.full[i]), 1);
                mbarrier_init(shared_address(&half.empty[i]), ROLE_WARPS);
            }
        work_tiles.init();
        fence_mbarrier_init();
    }
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");
