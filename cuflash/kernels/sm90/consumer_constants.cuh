// Sizes of a consumer warpgroup, of sm90/forward.cu and sm90/jvp.cu.
#pragma once
#include "common/constants.cuh"
#include "sm90/wgmma.cuh"

constexpr int CONSUMER_ROWS = WGMMA_M;                      // queries of a consumer warpgroup
constexpr int CONSUMER_WARPGROUPS = BLOCK_Q / CONSUMER_ROWS;
constexpr int CONSUMER_WARPS = CONSUMER_WARPGROUPS * 4;
constexpr int THREADS = (1 + CONSUMER_WARPGROUPS) * WARPGROUP;
constexpr int S_COUNT = BLOCK_K / 2, O_COUNT = HEAD_DIM_V / 2, P_COUNT = BLOCK_K / 4; // of a thread

using Scores = float[S_COUNT];
