// What the options of a call (docs/guide/options.md) do to the scores of one head: modifications,
// masks by pair, dropout.
//
// infinity(): sink.cuh.
#pragma once
#include "score/dropout.cuh"
#include "score/pair_mask.cuh"
#include "score/score_mod.cuh"

template <class Real> struct HeadOptions {
    ScoreMod<Real> score_mod;
    PairMask pair_mask;
    Dropout<Real> dropout;

    template <class Arguments>
    HeadOptions(const Arguments& args, int batch)
        : score_mod(args), pair_mask(args, batch), dropout(args) {}

    template <class Arguments> void set_head(const Arguments& args, int batch, int head) {
        score_mod.set_head(args, batch, head);
        pair_mask.set_head(head);
        dropout.set_head(batch, head);
    }
};
