// Before prepare/row_stats.cu, if sums of dQ are integers (sm90/integer_dq.cuh): writes the
// KeyMaxima of each key tile.
//
// Grid: one block per tile of BLOCK_K keys of one key head,
//     blockIdx.x = (batch * num_heads_kv + head) * num_k_tiles + k_tile
// Block: NUM_THREADS threads; LANES of a warp share a row, in chunks of 16 bytes.
//
// Constants: Element, NUM_THREADS, LANES, BLOCK_Q, BLOCK_K, HEAD_DIM, INTEGER_DQ; Arguments,
// SEGMENTS, PACKED; SHARED_BYTES. Shared memory: the maxima of each warp.
//
// Bound by memory: K and V read once. The order of additions is fixed.
#include "prepare/delta.cuh"
#include "sm90/integer_dq.cuh"

constexpr int WARPS = NUM_THREADS / 32;

struct SharedPlan { KeyMaxima warps[WARPS]; };
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

inline float fourth_root(float x) { return sqrtf(sqrtf(x)); }

// The lane's share of a row: the largest magnitude, which skips NaN, and the sum of squares.
struct RowShare { float most, squares; };

inline RowShare row_share(const Element* row, int lane, int columns) {
    RowShare share = {0.0f, 0.0f};
    const auto add = [&](float x) {
        share.most = fmaxf(share.most, fabsf(x));
        share.squares = fmaf(x, x, share.squares);
    };
    for (int d = lane * CHUNK; d < columns; d += LANES * CHUNK) {
        if (d + CHUNK <= columns) {
            const Chunk chunk = *reinterpret_cast<const Chunk*>(row + d);
            for (int i = 0; i < CHUNK; ++i) add(to_accumulator(chunk.x[i]));
        } else {
            for (int i = d; i < columns; ++i) add(to_accumulator(row[i]));
        }
    }
    return share;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
backward_key_maxima(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    KeyMaxima (&warps)[WARPS] = reinterpret_cast<SharedPlan*>(shared_bytes)->warps;
    const BackwardArguments& arrays = args.arrays;
    const Shape& shape = arrays.shape;
    const int num_k_tiles = num_key_tiles(args, BLOCK_K);
    const int slot = blockIdx.x % num_k_tiles, pair = blockIdx.x / num_k_tiles;
    const int head = pair % shape.num_heads_kv, batch = pair / shape.num_heads_kv;
    int tile = slot;
    const auto sequence = sequence_of_tile<true>(args, tile, BLOCK_K);
    const int first_row = sequence.first_k + tile * BLOCK_K;
    const int own_rows = seqlen_k_of(args, sequence) - tile * BLOCK_K;
    const int thread = threadIdx.x, lane = thread % LANES;
    const Strides &ks = arrays.k_stride, &vs = arrays.v_stride;
    const Element* k = static_cast<const Element*>(arrays.k) + batch * ks.batch + head * ks.head;
    const Element* v = static_cast<const Element*>(arrays.v) + batch * vs.batch + head * vs.head;

    KeyMaxima own = {0.0f, 0.0f, 0.0f, 0.0f};
    // Rows of the tile past a packed sequence's end are keys of others, masked. They matter only if
    // 0 * K is NaN.
    const int rows = own_rows <= 0 ? 0 : min(BLOCK_K, shape.seqlen_k - first_row);
    #pragma unroll 4
    for (int i = thread / LANES; i < BLOCK_K; i += NUM_THREADS / LANES) {
        const i64 row = i64(first_row) + i;
        const RowShare of_k =
            row_share(k + row * ks.token, lane, i < rows ? shape.head_dim : 0);
        const RowShare of_v =
            row_share(v + row * vs.token, lane, i < rows ? shape.head_dim_v : 0);
        const float k_squares = row_sum(of_k.squares), v_squares = row_sum(of_v.squares);
        const bool is_own = i < own_rows, is_finite = k_squares + v_squares < infinity();
        own.k = fmaxf(own.k, !is_finite ? infinity() : is_own ? of_k.most : 0.0f);
        own.v = fmaxf(own.v, is_own ? v_squares : 0.0f);
        if (is_own && lane == 0 && k_squares > 0.0f && v_squares > 0.0f) {
            own.roots += 1.0f / (fourth_root(k_squares) * fourth_root(v_squares));
            own.keys += 1.0f;
        }
    }
    for (int distance = 16; distance > 0; distance /= 2)
        own.add({__shfl_xor_sync(WHOLE_WARP, own.k, distance),
                 __shfl_xor_sync(WHOLE_WARP, own.v, distance),
                 __shfl_xor_sync(WHOLE_WARP, own.roots, distance),
                 __shfl_xor_sync(WHOLE_WARP, own.keys, distance)});
    if (thread % 32 == 0) warps[thread / 32] = own;
    __syncthreads();
    if (thread != 0) return;
    for (int warp = 1; warp < WARPS; ++warp) own.add(warps[warp]);
    *key_maxima(args, {slot, head, batch}) = own;
}
