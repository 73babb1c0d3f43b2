// Flags of the key tiles and of the query tiles that sm90/double_backward.cu leaves to
// simt/double_backward_dkdv.cu and double_backward_dq.cu. Those of key tiles come first.
#pragma once
#include "common/types.cuh"

constexpr int FLAG_TOKENS = 64;                             // of a tile

inline int flags_of_head(int seqlen) { return (seqlen + FLAG_TOKENS - 1) / FLAG_TOKENS; }

template <class Arguments>
inline int* key_flag(const Arguments& args, int batch, int kv_head, int key) {
    const Shape& shape = args.arrays.shape;
    return args.arrays.recompute_flags
         + (i64{batch} * shape.num_heads_kv + kv_head) * flags_of_head(shape.seqlen_k)
         + key / FLAG_TOKENS;
}
template <class Arguments>
inline int* query_flag(const Arguments& args, int batch, int head, int query) {
    const Shape& shape = args.arrays.shape;
    return key_flag(args, shape.batch, 0, 0)                // after the last
         + (i64{batch} * shape.num_heads_q + head) * flags_of_head(shape.seqlen_q)
         + query / FLAG_TOKENS;
}

// Whether the flag is set of a tile that lies within a flag's. Calls without flags compute all.
template <class Arguments> inline bool has_key_flag(const Arguments&, int, int, int) {
    return true;
}
inline bool has_key_flag(
    const DoubleBackwardWgmmaArguments& args, int batch, int kv_head, int key) {
    return *key_flag(args, batch, kv_head, key) != 0;
}
inline bool has_key_flag(
    const DoubleBackwardWgmmaExpressionArguments& args, int batch, int kv_head, int key) {
    return *key_flag(args, batch, kv_head, key) != 0;
}
template <class Arguments> inline bool has_query_flag(const Arguments&, int, int, int) {
    return true;
}
inline bool has_query_flag(
    const DoubleBackwardWgmmaArguments& args, int batch, int head, int query) {
    return *query_flag(args, batch, head, query) != 0;
}
inline bool has_query_flag(
    const DoubleBackwardWgmmaExpressionArguments& args, int batch, int head, int query) {
    return *query_flag(args, batch, head, query) != 0;
}
