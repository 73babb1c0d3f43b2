// The user's functions of one head, score_mod (SCORE_MOD) and mask_mod (MASK_MOD). This file is for
// calls without; for others cuflash/expressions/text.py writes it.
#pragma once
#include "score/no_mask_mod.cuh"
#include "score/no_score_mod.cuh"
