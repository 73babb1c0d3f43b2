// Packed sequences (PACKED): which sequence a tile belongs to, and the arguments of a call with
// that sequence alone.
//
// Sequence s has the tokens [offset(s), offset(s + 1)) of an array. The tokens after the last
// sequence, or all tokens if an offset is invalid, form one more sequence without a sink, whose
// queries see no key and whose keys no query sees. So its results are written too, as zeros.
//
// The tiles of a head are numbered by slots, so that no kernel has to count the tiles of earlier
// sequences. Sequence s has the slots from offset(s) / block + s on, up to the first one of
// sequence s + 1: enough, since floor(a) + ceil(b) <= floor(a + b) + 1. A head has
// total / block + num_sequences + 1 slots. Some slots have no tile; blocks skip them.
//
// Without PACKED a call is one sequence, and everything here compiles to nothing.
#pragma once
#include "common/constants.cuh"

// Offsets of queries or of keys.
struct Offsets {
    const int* first;
    i64 stride;
    int total;
    int at(int i) const { return first[i * stride]; }
};

template <class Arguments> inline Offsets query_offsets(const Arguments& args) {
    return {static_cast<const int*>(args.cu_seqlens_q), args.options.offset_q_stride,
            args.options.total_q};
}
template <class Arguments> inline Offsets key_offsets(const Arguments& args) {
    return {static_cast<const int*>(args.cu_seqlens_k), args.options.offset_k_stride,
            args.options.total_k};
}

// Queries of a head in lse, dlse and delta.
template <class Arguments> inline int rows_of_head(const Arguments& args) {
    if constexpr (PACKED) return args.options.total_q;
    else return arrays_of(args).shape.seqlen_q;
}
// The index of a query there.
template <class Arguments>
inline i64 index_of_query(const Arguments& args, int batch, int head, int query) {
    const i64 row = i64{batch} * arrays_of(args).shape.num_heads_q + head;
    return row * rows_of_head(args) + query;
}

// Keys of a head in what weight_sums writes.
template <class Arguments> inline int keys_of_head(const Arguments& args) {
    if constexpr (PACKED) return args.options.total_k;
    else return arrays_of(args).shape.seqlen_k;
}

// Tiles of a head; with PACKED slots.
template <class Arguments> inline int num_query_tiles(const Arguments& args, int block) {
    if constexpr (PACKED) return args.options.total_q / block + args.options.num_sequences + 1;
    else return (arrays_of(args).shape.seqlen_q + block - 1) / block;
}
template <class Arguments> inline int num_key_tiles(const Arguments& args, int block) {
    if constexpr (PACKED) return args.options.total_k / block + args.options.num_sequences + 1;
    else return (arrays_of(args).shape.seqlen_k + block - 1) / block;
}

// Sequence `number`. first_slot: the slot of its first tile.
struct Sequence { int number, first_q, first_k, seqlen_q, seqlen_k, first_slot; };

// Without PACKED: the whole call.
struct NoSequence {
    static constexpr bool has_tile = true;
    static constexpr int first_q = 0, first_k = 0;
};

template <bool> struct TileSequenceOf { using type = NoSequence; };
template <> struct TileSequenceOf<true> { using type = Sequence; };
using TileSequence = TileSequenceOf<PACKED>::type;

inline int number_of(NoSequence) { return 0; }
inline int number_of(const Sequence& sequence) { return sequence.number; }
template <class Arguments> inline int seqlen_q_of(const Arguments& args, NoSequence) {
    return arrays_of(args).shape.seqlen_q;
}
template <class Arguments> inline int seqlen_k_of(const Arguments& args, NoSequence) {
    return arrays_of(args).shape.seqlen_k;
}
template <class Arguments> inline int seqlen_q_of(const Arguments&, const Sequence& sequence) {
    return sequence.seqlen_q;
}
template <class Arguments> inline int seqlen_k_of(const Arguments&, const Sequence& sequence) {
    return sequence.seqlen_k;
}

// The call's shape; with PACKED a copy, for set_lengths().
template <class Arguments> inline decltype(auto) tile_shape(const Arguments& args) {
    if constexpr (PACKED) return Shape{arrays_of(args).shape};
    else return (arrays_of(args).shape);
}
template <class Shape> inline void set_lengths(const Shape&, NoSequence) {}
template <class Shape> inline void set_lengths(Shape& shape, const Sequence& sequence) {
    shape.seqlen_q = sequence.seqlen_q;
    shape.seqlen_k = sequence.seqlen_k;
}

// Whether `sequence` is the extra one, of the tokens outside all sequences.
template <class Arguments> inline bool is_none(const Arguments&, NoSequence) { return false; }
template <class Arguments> inline bool is_none(const Arguments& args, const Sequence& sequence) {
    return sequence.number == args.options.num_sequences;
}

// The sequence of a slot of queries or, OF_KEYS, of keys. Whole warp, which tests 32 offsets at a
// time.
template <bool OF_KEYS, class Arguments>
inline Sequence sequence_of_slot(const Arguments& args, int slot, int block) {
    const Offsets of_q = query_offsets(args), of_k = key_offsets(args);
    const Offsets of_tiles = OF_KEYS ? of_k : of_q;
    const int count = args.options.num_sequences;
    if (args.sequence_stats->bad)
        return {count, 0, 0, OF_KEYS ? 0 : of_q.total, OF_KEYS ? of_k.total : 0, 0};
    int low = 0, high = count + 1;                          // the sequence is in [low, high)
    while (high - low > 1) {
        const int step = (high - low + 31) / 32, number = low + threadIdx.x % 32 * step;
        const bool begins = number < high && of_tiles.at(number) / block + number <= slot;
        low += (__popc(__ballot_sync(0xFFFFFFFFu, begins)) - 1) * step;
        high = min(low + step, high);
    }
    const int first_q = of_q.at(low), first_k = of_k.at(low);
    const int first_slot = (OF_KEYS ? first_k : first_q) / block + low;
    if (low < count)
        return {low, first_q, first_k, of_q.at(low + 1) - first_q, of_k.at(low + 1) - first_k,
                first_slot};
    return {low, first_q, first_k, OF_KEYS ? 0 : of_q.total - first_q,
            OF_KEYS ? of_k.total - first_k : 0, first_slot};
}

// Sequence `number`, or the extra one, of queries. Without PACKED: the whole call.
template <class Arguments> inline auto sequence_of_number(const Arguments& args, int number) {
    if constexpr (PACKED) {
        const Offsets of_q = query_offsets(args), of_k = key_offsets(args);
        const int count = args.options.num_sequences;
        if (args.sequence_stats->bad)
            return Sequence{number, 0, 0, number < count ? 0 : of_q.total, 0, 0};
        const int first_q = of_q.at(number), first_k = of_k.at(number);
        if (number == count)
            return Sequence{number, first_q, first_k, of_q.total - first_q, 0, 0};
        return Sequence{number, first_q, first_k, of_q.at(number + 1) - first_q,
                        of_k.at(number + 1) - first_k, 0};
    } else {
        return NoSequence{};
    }
}

// The first slot of the sequence with the most keys (for tiles of queries) or the most queries, or
// the first slot after it. Its tiles take longest, so the first block starts there.
template <bool OF_KEYS, class Arguments>
inline int slot_of_longest(const Arguments& args, bool after, int block) {
    const SequenceStats stats = *args.sequence_stats;
    if (stats.bad || args.options.num_sequences == 0) return 0;
    const int number = (OF_KEYS ? stats.most_queries : stats.most_keys) + (after ? 1 : 0);
    const Offsets offsets = OF_KEYS ? key_offsets(args) : query_offsets(args);
    return offsets.at(number) / block + number;
}

// The sequence of slot `tile`. `tile` becomes the tile's index within the sequence. has_tile:
// whether that tile has tokens.
struct BlockSequence : Sequence { bool has_tile; };

template <bool OF_KEYS, class Arguments>
inline auto sequence_of_tile(const Arguments& args, int& tile, int block) {
    if constexpr (PACKED) {
        const Sequence sequence = sequence_of_slot<OF_KEYS>(args, tile, block);
        tile -= sequence.first_slot;
        const int length = OF_KEYS ? sequence.seqlen_k : sequence.seqlen_q;
        return BlockSequence{sequence, i64(tile) * block < length};
    } else {
        return NoSequence{};
    }
}

// The same for the block that is `order`-th to start; if `descending`, `order` counts from the last
// tile down.
template <bool OF_KEYS, class Arguments>
inline auto sequence_of_block(const Arguments& args, int& order, int block, bool descending) {
    if constexpr (PACKED) {
        const int slots =
            OF_KEYS ? num_key_tiles(args, block) : num_query_tiles(args, block);
        order = (order + slot_of_longest<OF_KEYS>(args, descending, block)) % slots;
    }
    return sequence_of_tile<OF_KEYS>(args, order, block);
}

template <class T> inline void advance(T*& pointer, i64 elements) {
    using Bytes = const unsigned char;
    pointer = const_cast<T*>(static_cast<const void*>(
        static_cast<Bytes*>(pointer) + elements * static_cast<i64>(sizeof(Element))));
}

inline void advance(ForwardArguments& a, const Sequence& sequence, int, int) {
    const int q = sequence.first_q, k = sequence.first_k;
    advance(a.q, q * a.q_stride.token);
    advance(a.k, k * a.k_stride.token);
    advance(a.v, k * a.v_stride.token);
    advance(a.out, q * a.out_stride.token);
    if (a.lse != nullptr) a.lse = static_cast<Accumulator<Element>*>(a.lse) + q;
}

// slot: the sequence's first query tile.
inline void advance(BackwardArguments& a, const Sequence& sequence, int slot, int sums_of_tile) {
    const int q = sequence.first_q, k = sequence.first_k;
    advance(a.dout, q * a.dout_stride.token);
    advance(a.q, q * a.q_stride.token);
    advance(a.k, k * a.k_stride.token);
    advance(a.v, k * a.v_stride.token);
    advance(a.out, q * a.out_stride.token);
    advance(a.dq, q * a.dq_stride.token);
    advance(a.dk, k * a.dk_stride.token);
    advance(a.dv, k * a.dv_stride.token);
    a.lse = static_cast<const Accumulator<Element>*>(a.lse) + q;
    a.delta = static_cast<Accumulator<Element>*>(a.delta) + q;
    a.dq_sum = static_cast<float*>(a.dq_sum) + i64(slot) * sums_of_tile;
    if (a.dq_semaphores != nullptr) a.dq_semaphores += slot;
}

inline void advance(ReadoutArguments& a, const Sequence& sequence, int, int) {
    const int q = sequence.first_q, k = sequence.first_k;
    using Real = Accumulator<Element>;
    advance(a.q, q * a.q_stride.token);
    advance(a.k, k * a.k_stride.token);
    advance(a.dq, q * a.dq_stride.token);
    advance(a.dk, k * a.dk_stride.token);
    a.lse = static_cast<const Real*>(a.lse) + q;
    if (a.row_weights != nullptr)
        a.row_weights = static_cast<const Real*>(a.row_weights) + q * a.row_weights_stride.query;
    if (a.chosen != nullptr)
        a.chosen = static_cast<const u8*>(a.chosen) + q * a.chosen_stride.token;
}

template <class Arguments> inline void advance_dlse(Arguments&, int) {}
inline void advance_dlse(BackwardOptionsArguments& a, int q) {
    if (a.dlse != nullptr) a.dlse = static_cast<const Accumulator<Element>*>(a.dlse) + q;
}
inline void advance_dlse(BackwardWgmmaOptionsArguments& a, int q) {
    if (a.dlse != nullptr) a.dlse = static_cast<const Accumulator<Element>*>(a.dlse) + q;
}
inline void advance_dlse(BackwardExpressionArguments& a, int q) {
    if (a.dlse != nullptr) a.dlse = static_cast<const Accumulator<Element>*>(a.dlse) + q;
}
inline void advance_dlse(BackwardWgmmaExpressionArguments& a, int q) {
    if (a.dlse != nullptr) a.dlse = static_cast<const Accumulator<Element>*>(a.dlse) + q;
}

// Of the structs of calls that may have rests: lse_rest.cuh.
template <class Arguments> inline void advance_lse_rests(Arguments&, int) {}
inline void advance_lse_rests(void*& rests, int q) {
    if (rests != nullptr) rests = static_cast<Accumulator<Element>*>(rests) + q;
}
inline void advance_lse_rests(BackwardOptionsArguments& a, int q) {
    advance_lse_rests(a.lse_rests, q);
}
inline void advance_lse_rests(BackwardWgmmaOptionsArguments& a, int q) {
    advance_lse_rests(a.lse_rests, q);
}
inline void advance_lse_rests(BackwardExpressionArguments& a, int q) {
    advance_lse_rests(a.lse_rests, q);
}
inline void advance_lse_rests(BackwardWgmmaExpressionArguments& a, int q) {
    advance_lse_rests(a.lse_rests, q);
}
inline void advance_lse_rests(ReadoutOptionsArguments& a, int q) {
    advance_lse_rests(a.lse_rests, q);
}
inline void advance_lse_rests(ReadoutExpressionArguments& a, int q) {
    advance_lse_rests(a.lse_rests, q);
}
inline void advance_lse_rests(JvpOptionsArguments& a, int q) {
    advance_lse_rests(a.lse_rests, q);
}
inline void advance_lse_rests(JvpExpressionArguments& a, int q) {
    advance_lse_rests(a.lse_rests, q);
}
inline void advance_lse_rests(DoubleBackwardOptionsArguments& a, int q) {
    advance_lse_rests(a.lse_rests, q);
}
inline void advance_lse_rests(DoubleBackwardExpressionArguments& a, int q) {
    advance_lse_rests(a.lse_rests, q);
}

// Of the structs of forward calls that may return it: max_score.cuh.
template <class Arguments> inline void advance_max_score(Arguments&, int) {}
inline void advance_max_score(void*& max_score, int q) {
    if (max_score != nullptr) max_score = static_cast<Accumulator<Element>*>(max_score) + q;
}
inline void advance_max_score(ForwardOptionsArguments& a, int q) {
    advance_max_score(a.max_score, q);
}
inline void advance_max_score(ForwardExpressionArguments& a, int q) {
    advance_max_score(a.max_score, q);
}

template <class Arguments>
inline void advance_each_tangent(Arguments& a, const Sequence& sequence) {
    const TangentNumbers& stride = a.tangents;
    advance(a.q_dot, sequence.first_q * stride.q_dot.token);
    advance(a.k_dot, sequence.first_k * stride.k_dot.token);
    advance(a.v_dot, sequence.first_k * stride.v_dot.token);
    advance(a.out_dot, sequence.first_q * stride.out_dot.token);
    if (a.lse_dot != nullptr)
        a.lse_dot = static_cast<Accumulator<Element>*>(a.lse_dot) + sequence.first_q;
}
template <class Arguments> inline void advance_tangents(Arguments&, const Sequence&) {}
inline void advance_tangents(JvpOptionsArguments& a, const Sequence& sequence) {
    advance_each_tangent(a, sequence);
}
inline void advance_tangents(JvpExpressionArguments& a, const Sequence& sequence) {
    advance_each_tangent(a, sequence);
}
template <class Arguments>
inline void advance_second_tangents(Arguments& a, const Sequence& sequence) {
    advance_each_tangent(a, sequence);
    a.delta_dot = static_cast<Accumulator<Element>*>(a.delta_dot) + sequence.first_q;
}
inline void advance_tangents(DoubleBackwardOptionsArguments& a, const Sequence& sequence) {
    advance_second_tangents(a, sequence);
}
inline void advance_tangents(DoubleBackwardExpressionArguments& a, const Sequence& sequence) {
    advance_second_tangents(a, sequence);
}

// The arguments of a call with that sequence alone, except for rows_of_head and num_query_tiles.
// sums_of_tile: floats of a tile's sums of dQ.
template <class Arguments>
inline Arguments sequence_arguments(
    const Arguments& args, const Sequence& sequence, int block_q, int sums_of_tile = 0) {
    Arguments own = args;
    own.arrays.shape.seqlen_q = sequence.seqlen_q;
    own.arrays.shape.seqlen_k = sequence.seqlen_k;
    own.options.sequence = sequence.number;
    advance(own.arrays, sequence, sequence.first_q / block_q + sequence.number, sums_of_tile);
    advance_dlse(own, sequence.first_q);
    advance_lse_rests(own, sequence.first_q);
    advance_max_score(own, sequence.first_q);
    advance_tangents(own, sequence);
    return own;
}
template <class Arguments>
inline const Arguments& sequence_arguments(const Arguments& args, NoSequence, int, int = 0) {
    return args;
}
