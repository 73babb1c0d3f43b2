// Before attention over a KV cache: rotates new keys and appends them with their values, in place;
// rotates queries into a workspace; and packed queries of no sequence get out 0 and lse -inf.
//
//     k_cache[b, L_b + i] = rotate(k_new[b, i], L_b + i),  v_cache[b, L_b + i] = v_new[b, i]
//
// with L_b the tokens before the call. Query i is rotated by L_b + i if ORDERED, else by L_b. A row
// of float8 is divided by its scale, and what exceeds 448 becomes 448 with its sign. Nothing is
// written for a sequence whose length, slot or page is invalid. LATENT: values are the first
// columns of keys, and written with them.
//
// Grid: a warp for each head of a token. First the rows of k_new, then those of v_new, then those
// of q, if they are rotated or packed:
//     row = token * num_heads + head, token = sequence * seqlen + i, or the place in packed tokens
// Block: NUM_THREADS threads. No shared memory.
//
// Constants: Element, Cached, Table, KVCACHE and those of a KV cache (constants.cuh), HAS_NEW,
// ROTARY, ORDERED, NUM_THREADS; Arguments.
//
// Bound by latency: a token is some kilobytes.
#include "common/float8.cuh"
#include "decode/key_rows.cuh"
#include "prepare/rotary.cuh"

constexpr int NUM_WARPS = NUM_THREADS / 32;

// A token and its sequence; number is -1 if it has none.
struct Token { int number, index; };

// `packed`: tokens are counted as in cu_seqlens_q.
__device__ __forceinline__ Token find_token(
    const Arguments& args, bool packed, int token, int seqlen) {
    if (!packed) return {token / seqlen, token % seqlen};
    // The last sequence that begins at the token or before.
    int low = 0, high = args.arrays.shape.batch;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (args.cu_seqlens_q[middle * args.cache.cu_seqlens_stride] <= token) low = middle;
        else high = middle;
    }
    const Sequence sequence = sequence_of(args, low);
    const int index = token - sequence.first_query;
    return {high > 0 && index >= 0 && index < sequence.seqlen_q ? low : -1, index};
}

__device__ __forceinline__ void store_cached(unsigned char* row, int column, Real x, float scale) {
    if constexpr (sizeof(Cached) == 1) row[column] = float_to_float8(static_cast<float>(x) / scale);
    else reinterpret_cast<Element*>(row)[column] = from_accumulator<Element>(x);
}

// Calls store(column, x) for each column of a row of `source`, rotated for a position.
template <bool ROTATES, class Store>
__device__ __forceinline__ void for_each_column(
    const Arguments& args, const Element* source, i64 column_stride, int head_dim, i64 position,
    Store store) {
    const int lane = threadIdx.x % 32;
    const int num_pairs = ROTATES ? args.cache.num_pairs : 0;
    if constexpr (ROTATES) {
        const KVCacheNumbers& cache = args.cache;
        const RotaryTables tables{args.rotary_cos, args.rotary_sin, cache.cos_stride,
                                  cache.sin_stride, cache.num_positions};
        for (int pair = lane; pair < num_pairs; pair += 32) {
            const int first = pair * cache.pair_step, second = first + cache.pair_width;
            const Rotation rotation = tables.rotation(position, pair);
            const Real a = to_accumulator(source[first * column_stride]);
            const Real b = to_accumulator(source[second * column_stride]);
            store(first, rotation.first(a, b));
            store(second, rotation.second(a, b));
        }
    }
    for (int column = 2 * num_pairs + lane; column < head_dim; column += 32)
        store(column, to_accumulator(source[column * column_stride]));
}

// Appends a row of k_new (ROTATES: rotated if the call rotates) or of v_new to its cache.
template <bool ROTATES>
__device__ __forceinline__ void append_row(
    const Arguments& args, int row, const void* source, const ElementStrides& source_stride,
    const void* cache, const Strides& cache_stride, const float* scales,
    const HeadStrides& scale_stride, int head_dim) {
    const int num_heads = args.arrays.shape.num_heads_kv, head = row % num_heads;
    const int token = row / num_heads;
    const Token found = find_token(args, PACKED_NEW, token, args.cache.seqlen_new);
    if (found.number < 0) return;
    Sequence sequence = sequence_of(args, found.number);
    if (all_tokens(args, sequence) == 0) return;
    sequence.first_key = 0;                                 // padding counts as tokens here
    const int position = static_cast<int>(cached_tokens(args, found.number)) + found.index;
    const int page = Pages<Arguments>{args, found.number}.of_key(position);
    if (page < 0) return;
    const Element* x = static_cast<const Element*>(source)
                     + (PACKED_NEW ? row_offset(source_stride, 0, token, head)
                                   : row_offset(source_stride, found.number, found.index, head));
    const KeyRows rows(args, cache, cache_stride, sequence, head);
    unsigned char* target = const_cast<unsigned char*>(rows.row(page, position));
    const float scale = SCALES == NO_SCALES ? 1.0f : scale_of(scales, scale_stride, page, head);
    for_each_column<ROTATES>(args, x, source_stride.column, head_dim, position,
                             [&](int column, Real y) { store_cached(target, column, y, scale); });
}

// Rotates a row of q into arrays.q, or, if it is of no sequence, stores its result.
__device__ __forceinline__ void prepare_query(const Arguments& args, int row) {
    const ForwardArguments& arrays = args.arrays;
    const Shape& shape = arrays.shape;
    const int head = row % shape.num_heads_q, token = row / shape.num_heads_q;
    const Token found = find_token(args, PACKED_QUERIES, token, shape.seqlen_q);
    if (found.number < 0) {
        Element* out = static_cast<Element*>(arrays.out) + token * arrays.out_stride.token
                     + head * arrays.out_stride.head;
        for (int column = threadIdx.x % 32; column < shape.head_dim_v; column += 32)
            out[column] = from_accumulator<Element>(0);
        if (threadIdx.x % 32 == 0 && arrays.lse != nullptr)
            static_cast<Real*>(arrays.lse)[i64(head) * args.cache.total_q + token] =
                -Real(__int_as_float(0x7F800000));
    } else if constexpr (ROTARY) {
        const i64 batch = PACKED_QUERIES ? 0 : found.number;
        const i64 index = PACKED_QUERIES ? token : found.index;
        const Element* x = static_cast<const Element*>(args.q_given)
                         + row_offset(args.cache.q_stride, batch, index, head);
        const Strides& stride = arrays.q_stride;
        Element* target = static_cast<Element*>(const_cast<void*>(arrays.q))
                        + batch * stride.batch + index * stride.token + head * stride.head;
        const i64 position = cached_tokens(args, found.number) + (ORDERED ? found.index : 0);
        for_each_column<true>(
            args, x, args.cache.q_stride.column, shape.head_dim, position,
            [&](int column, Real y) { target[column] = from_accumulator<Element>(y); });
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
append_kvcache(const __grid_constant__ Arguments args) {
    const ForwardArguments& arrays = args.arrays;
    const Shape& shape = arrays.shape;
    const KVCacheNumbers& cache = args.cache;
    const int new_tokens = PACKED_NEW ? cache.total_q : shape.batch * cache.seqlen_new;
    const int new_rows = HAS_NEW ? new_tokens * shape.num_heads_kv : 0;
    const int queries = PACKED_QUERIES ? cache.total_q : shape.batch * shape.seqlen_q;
    int row = blockIdx.x * NUM_WARPS + threadIdx.x / 32;
    if (row < new_rows) {
        append_row<ROTARY>(args, row, args.k_new, cache.k_new_stride, arrays.k, arrays.k_stride,
                           args.k_scale, cache.k_scale_stride, shape.head_dim);
        return;
    }
    row -= new_rows;
    if constexpr (!LATENT) {
        if (row < new_rows) {
            append_row<false>(args, row, args.v_new, cache.v_new_stride, arrays.v, arrays.v_stride,
                              args.v_scale, cache.v_scale_stride, shape.head_dim_v);
            return;
        }
        row -= new_rows;
    }
    if (row < queries * shape.num_heads_q) prepare_query(args, row);
}
