// packed_sequences.cuh for kernels of calls without options.
#pragma once
#include "common/types.cuh"

template <class Arguments> inline int rows_of_head(const Arguments& args) {
    return arrays_of(args).shape.seqlen_q;
}
template <class Arguments> inline int num_query_tiles(const Arguments& args, int block) {
    return (arrays_of(args).shape.seqlen_q + block - 1) / block;
}
template <class Arguments> inline int num_key_tiles(const Arguments& args, int block) {
    return (arrays_of(args).shape.seqlen_k + block - 1) / block;
}

struct Sequence { int number, first_q, first_k, seqlen_q, seqlen_k, first_slot; };
struct NoSequence {
    static constexpr bool has_tile = true;
    static constexpr int first_q = 0, first_k = 0;
};
using TileSequence = NoSequence;

inline int number_of(NoSequence) { return 0; }
template <class Arguments> inline int seqlen_q_of(const Arguments& args, NoSequence) {
    return arrays_of(args).shape.seqlen_q;
}
template <class Arguments> inline int seqlen_k_of(const Arguments& args, NoSequence) {
    return arrays_of(args).shape.seqlen_k;
}
template <class Arguments> inline const Shape& tile_shape(const Arguments& args) {
    return arrays_of(args).shape;
}
template <class Arguments>
inline i64 index_of_query(const Arguments&, int, int, int) { return 0; }
template <class Shape> inline void set_lengths(const Shape&, NoSequence) {}
template <class Arguments> bool is_none(const Arguments&, NoSequence);

template <bool OF_KEYS, class Arguments>
inline NoSequence sequence_of_block(const Arguments&, int, int, bool) { return {}; }

template <bool OF_KEYS, class Arguments>
inline NoSequence sequence_of_tile(const Arguments&, int, int) { return {}; }

template <class Arguments>
inline const Arguments& sequence_arguments(const Arguments& args, NoSequence, int, int = 0) { return args; }
