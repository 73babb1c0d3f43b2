// In place of the user's mask_mod, in calls without: what score/expression.cuh has of one.
//
// Any query and key may be passed, also past the arrays' ends. visible() is pure.
#pragma once
#include "score/visibility.cuh"

constexpr bool MASK_OF_BATCH = false, MASK_OF_HEAD = false;    // what the mask depends on

struct MaskExpression {
    template <class Arguments> void set_head(const Arguments&, int, int, int, int) {}
    bool visible(int, int) const { return true; }
    // Of queries [first_query, last_query] and keys [first_key, last_key]; PARTLY also means
    // unknown. WHOLE_WARP: called by all lanes with the same tile, otherwise by one.
    template <bool WHOLE_WARP> Visibility visibility(int, int, int, int) const {
        return Visibility::ALL;
    }
};
