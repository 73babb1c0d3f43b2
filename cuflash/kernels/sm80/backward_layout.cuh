// How the warps of sm80/backward.cu share its products.
#pragma once
#include "common/dq_accum.cuh"

using ScoreGrid = WarpGrid<BLOCK_Q, BLOCK_K, SCORE_WARPS_Q>;            // S, dP
using KeyGrid = WarpGrid<BLOCK_K, HEAD_DIM, GRADIENT_WARPS_K>;          // dK
using ValueGrid = WarpGrid<BLOCK_K, HEAD_DIM_V, GRADIENT_WARPS_K>;      // dV
