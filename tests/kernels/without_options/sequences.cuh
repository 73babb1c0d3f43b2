// sequences.cuh for kernels of calls without options.
#pragma once
#include "types.cuh"

template <class Arguments> inline int rows_of_head(const Arguments& all) {
    return arrays_of(all).shape.seqlen_q;
}
template <class Arguments> inline int num_query_tiles(const Arguments& all, int block) {
    return (arrays_of(all).shape.seqlen_q + block - 1) / block;
}
template <class Arguments> inline int num_key_tiles(const Arguments& all, int block) {
    return (arrays_of(all).shape.seqlen_k + block - 1) / block;
}

struct NoSequence { static constexpr bool has_tile = true; };

template <bool OF_KEYS, class Arguments>
inline NoSequence sequence_of_block(const Arguments&, int, int, bool) { return {}; }

template <class Arguments>
inline const Arguments& of_sequence(const Arguments& all, NoSequence, int, int = 0) { return all; }
