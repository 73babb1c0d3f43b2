// Element types, and the arguments that a kernel gets from the host. arguments.py mirrors those
// structs field by field; tests/test_arguments.py holds the two together. Strides count elements.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// 16-bit floating-point numbers as they stand in memory. ptx.cuh converts them to float and back.
struct alignas(2) float16 { u16 bits; };
struct alignas(2) bfloat16 { u16 bits; };

// The type in which scores, sums and lse of an Element are held.
template <typename Element> struct AccumulatorOf { using type = float; };
template <> struct AccumulatorOf<double> { using type = double; };
template <typename Element> using Accumulator = typename AccumulatorOf<Element>::type;

// Strides of an array (batch, seqlen, heads, head_dim), whose last axis has stride 1.
struct Strides { i64 batch, token, head; };

struct Shape { int batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim, head_dim_v; };

// Tile order of the grid (scheduler.cuh): how many (batch, head) pairs a section has; heads, where
// the tiles of all batches are in one order.
struct Schedule { int heads_per_section; };

// Work items of the static scheduler of persistent blocks (scheduler.cuh). pairs, singles: of one
// head; paired_items, items: pairs, and pairs and single tiles, of all heads.
struct StaticSchedule { int pairs, singles, paired_items, items; };

// lse and delta are contiguous (batch, num_heads_q, seqlen_q) arrays of Accumulator<Element>.
struct ForwardArguments {
    const void* q; const void* k; const void* v;
    void* out;
    void* lse;                                  // null: not requested
    Strides q_stride, k_stride, v_stride, out_stride;
    Shape shape;
    Schedule schedule;
    double scale;
};

struct BackwardArguments {
    const void* dout; const void* q; const void* k; const void* v; const void* out;
    const void* lse;
    void* delta;                                // rowsum(dO * O), written by prepare/delta.cu
    void* dq_sum;                               // float sums of dQ, ordered by dq_accum.cuh
    void* turns;                                // int: dq_semaphore.cuh, counters.cuh; or null
    void* dq; void* dk; void* dv;
    Strides dout_stride, q_stride, k_stride, v_stride, out_stride, dq_stride, dk_stride, dv_stride;
    Shape shape;
    Schedule schedule;
    double scale;
};

// Strides of options (docs/masks.md), in elements; 0 along axes that the user left out.
struct HeadStrides { i64 batch, head; };
struct TokenStrides { i64 batch, token; };
struct PairStrides { i64 batch, head, query, key; };

struct OptionNumbers {
    PairStrides bias_stride, mask_stride, dbias_stride;
    HeadStrides alibi_stride;
    TokenStrides ids_q_stride, ids_k_stride;
    i64 sink_stride;                            // from head to head
    double softcap;
    float cap_terms[4], cap_terms_log2[4];      // the softcap's polynomials: softcap.cuh
    float cap_small, cap_inverse_log2;
    float cap_slight_terms_log2[3], cap_slight, cap_lowest;
    double keep_factor;                         // of dropout: 1 / (1 - probability)
    i64 offset_q_stride, offset_k_stride;       // of cu_seqlens
    int window_left, window_right;              // both at least 0, and less than 2^30
    u32 drop_below;                             // of dropout: smaller words drop a pair
    int num_sequences, total_q, total_k;        // of packed sequences; tokens of all of them
    int max_seqlen_q, max_seqlen_k;
    int sequence;                               // the block's: packed_sequences.cuh
};

// Calls with options. Arrays that a call lacks are null.
struct ForwardOptionsArguments {
    const void* alibi_slopes;                   // float, (batch, num_heads_q)
    const void* bias;                           // Bias, (batch, num_heads_q, seqlen_q, seqlen_k)
    const void* mask;                           // a byte, 0 or 1, of the same shape
    const void* sink;                           // Accumulator<Element>, (num_heads_q)
    const void* segment_ids_q;                  // int, (batch, seqlen_q)
    const void* segment_ids_k;                  // int, (batch, seqlen_k)
    const void* cu_seqlens_q;                   // int, (num_sequences + 1)
    const void* cu_seqlens_k;
    u64 seed;                                   // of dropout
    void* found;                                // workspace of prepare/segment_*.cu (see
                                                // segment_ranges.cuh) or packed_sequences.cu
    ForwardArguments arrays;
    OptionNumbers options;
};

struct BackwardOptionsArguments {
    const void* alibi_slopes;
    const void* bias;
    const void* mask;
    const void* sink;
    const void* segment_ids_q;
    const void* segment_ids_k;
    const void* cu_seqlens_q;
    const void* cu_seqlens_k;
    u64 seed;
    void* found;
    void* dbias;                                // its sums (dbias.cuh); null: not requested
    void* dsink;                                // contiguous; null: not wanted
    BackwardArguments arrays;
    OptionNumbers options;
};

// All arrays are contiguous: out, out_a and out_b (batch, seqlen_q, num_heads_q, head_dim_v); lse,
// lse_a and lse_b (batch, num_heads_q, seqlen_q).
struct MergeArguments {
    const void* out_a; const void* lse_a; const void* out_b; const void* lse_b;
    void* out; void* lse;
    int batch, seqlen_q, num_heads_q, head_dim_v;
};

// A 4-D tensor in global memory as the TMA unit sees it. The driver encodes it: opaque.
struct alignas(64) TensorMap { u64 opaque[16]; };

// Maps are of (head_dim, token, head, batch), boxes of 64 columns and a tile's rows.
struct ForwardWgmmaArguments {
    TensorMap q_map, k_map, v_map, out_map;
    ForwardArguments arrays;
    StaticSchedule work_items;
};

struct ForwardWgmmaOptionsArguments {
    TensorMap q_map, k_map, v_map, out_map;
    const void* alibi_slopes;
    const void* bias;
    const void* mask;
    const void* sink;
    const void* segment_ids_q;
    const void* segment_ids_k;
    const void* cu_seqlens_q;
    const void* cu_seqlens_k;
    u64 seed;
    void* found;
    ForwardArguments arrays;
    OptionNumbers options;
    StaticSchedule work_items;
};

// The maps of q and dout have boxes of 64 columns and a query tile's rows, those of k and v a key
// tile's, those of dk and dv 16. `delta` and `turns`: query_rows.cuh, counters.cuh.
struct BackwardWgmmaArguments {
    TensorMap q_map, dout_map, k_map, v_map, dk_map, dv_map;
    BackwardArguments arrays;
};

struct BackwardWgmmaOptionsArguments {
    TensorMap q_map, dout_map, k_map, v_map, dk_map, dv_map;
    const void* alibi_slopes;
    const void* bias;
    const void* mask;
    const void* sink;
    const void* segment_ids_q;
    const void* segment_ids_k;
    const void* cu_seqlens_q;
    const void* cu_seqlens_k;
    u64 seed;
    void* found;
    void* dbias;
    void* dsink;
    BackwardArguments arrays;
    OptionNumbers options;
};

// The arguments that all structs of a direction contain.
inline const ForwardArguments& arrays_of(const ForwardArguments& arguments) { return arguments; }
inline const ForwardArguments& arrays_of(const ForwardOptionsArguments& arguments) {
    return arguments.arrays;
}
inline const ForwardArguments& arrays_of(const ForwardWgmmaArguments& arguments) {
    return arguments.arrays;
}
inline const ForwardArguments& arrays_of(const ForwardWgmmaOptionsArguments& arguments) {
    return arguments.arrays;
}
inline const BackwardArguments& arrays_of(const BackwardArguments& arguments) { return arguments; }
inline const BackwardArguments& arrays_of(const BackwardWgmmaArguments& arguments) {
    return arguments.arrays;
}
inline const BackwardArguments& arrays_of(const BackwardOptionsArguments& arguments) {
    return arguments.arrays;
}
inline const BackwardArguments& arrays_of(const BackwardWgmmaOptionsArguments& arguments) {
    return arguments.arrays;
}

// A compile-time bool as a function argument: `if constexpr (masked.value)`.
template <bool VALUE> struct Bool { static constexpr bool value = VALUE; };
