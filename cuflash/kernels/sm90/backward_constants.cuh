// Constants of the backward kernels on Hopper, sm90/backward.cu and sm90/backward_wide.cu, that
// follow from the generated ones.
#pragma once
#include "score/pair_mask.cuh"
#include "common/softmax.cuh"
#include "score/score_mod.cuh"

// A thread's floats of 64 keys' S^T.
constexpr int S_REGS = BLOCK_Q / 2 / SCORE_WARPGROUPS;
constexpr bool OPTIONS = WINDOW || PAIRWISE || !LINEAR || DROPOUT;
constexpr bool MASKED = CAUSAL || WINDOW || PAIRWISE || PACKED;      // some pairs may be masked

constexpr bool DETERMINISTIC = DQ_SEMAPHORES > 0;
constexpr bool LAST_KEYS_FIRST = DETERMINISTIC && CAUSAL;   // in all sections but the last

// Whether a whole warp, not one thread, produces Q: it takes 32 lanes to search for tiles.
constexpr bool WARP_PRODUCER = SKIPS_TILES || PACKED;

// Registers permitting, P stays in float until dS is computed. Otherwise dS comes from rounded P.
constexpr bool FLOAT_P = BLOCK_Q <= 64;

// Options that mask pairs give one bit per pair, computed while S is. The causal mask alone does
// not: it masks pairs of few tiles, and is applied to P by comparing positions.
constexpr bool VISIBILITY_BITS = WINDOW || PAIRWISE;

// P = 0 makes dS 0 or, if dP or delta is not finite, NaN. A NaN in dQ or dK makes finish/dq.cu
// recompute the row (recompute.cuh), so with VISIBILITY_BITS dS is left as it is. Sums of dbias are
// never recomputed, so DBIAS masks dS. So does SCORE_MOD: where a pair is masked, the user's
// function may have any derivative.
constexpr bool MASK_DS = !VISIBILITY_BITS || DBIAS || SCORE_MOD;

// Whether dx / d(scale S) is not 1 (SCORE_BENDS: of the user's function).
constexpr bool SCORES_BEND = SOFTCAP || (SCORE_MOD && SCORE_BENDS);

static_assert(!(PACKED && (BIAS || PAIRWISE)),
              "packed sequences do not support bias, mask or segment ids");
static_assert(!INTEGER_DQ || WARP_PRODUCER, "other calls have an order");
static_assert(!(WARP_PRODUCER && DETERMINISTIC),
              "deterministic order requires consecutive key tiles at every query tile");
static_assert(FLOAT_P || !(SCORES_BEND || DROPOUT), "dS does not follow from the rounded P alone");
