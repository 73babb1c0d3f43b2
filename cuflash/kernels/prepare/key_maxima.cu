// Before prepare/row_stats.cu, if sums of dQ are integers (sm90/integer_dq.cuh): writes the
// KeyMaxima of each key tile.
//
// Grid: one block per tile of BLOCK_K keys of one key head,
//     blockIdx.x = (batch * num_heads_kv + head) * num_k_tiles + k_tile
// Block: NUM_THREADS threads; LANES of a warp share a row, a chunk of 16 bytes each.
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

// The lane's chunk of a row, eight elements, or zeros.
inline uint4 load_chunk(const Element* row, int lane, int columns) {
    const int first = lane * CHUNK;
    return first + CHUNK <= columns ? *reinterpret_cast<const uint4*>(row + first)
                                    : uint4{0, 0, 0, 0};
}
// The pair of elements from `first` on of a row that ends within the chunk.
inline u32 load_pair(const Element* row, int first, int columns) {
    const u32 low = first < columns ? row[first].bits : 0;
    const u32 high = first + 1 < columns ? row[first + 1].bits : 0;
    return low | high << 16;
}
inline uint4 load_last_chunk(const Element* row, int lane, int columns, uint4 chunk) {
    const int first = lane * CHUNK;
    if (columns % CHUNK == 0 || first + CHUNK <= columns) return chunk;
    return uint4{load_pair(row, first, columns), load_pair(row, first + 2, columns),
                 load_pair(row, first + 4, columns), load_pair(row, first + 6, columns)};
}

// The largest magnitude, which skips NaN, and the sum of squares.
struct ChunkShare { float most, squares; };
inline ChunkShare share_of(uint4 chunk) {
    ChunkShare share = {0.0f, 0.0f};
    const auto add = [&](float x) {
        share.most = fmaxf(share.most, fabsf(x));
        share.squares = fmaf(x, x, share.squares);
    };
    const u32 pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    #pragma unroll
    for (u32 pair : pairs) {
        add(to_float(low_half<Element>(pair)));
        add(to_float(high_half<Element>(pair)));
    }
    return share;
}

// Three blocks an SM, 96 KB of loads in flight.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 3)
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
    constexpr int PARALLEL_ROWS = NUM_THREADS / LANES, ROWS = BLOCK_K / PARALLEL_ROWS;
    constexpr int BATCH = ROWS < 4 ? ROWS : 4;              // rows whose loads are in flight
    static_assert(BLOCK_K % PARALLEL_ROWS == 0 && ROWS % BATCH == 0, "all lanes have rows");
    #pragma unroll 1
    for (int first = thread / LANES; first < BLOCK_K; first += BATCH * PARALLEL_ROWS) {
        uint4 of_k[BATCH], of_v[BATCH];
        #pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int i = first + b * PARALLEL_ROWS;
            const i64 row = i64(first_row) + i;
            of_k[b] = load_chunk(k + row * ks.token, lane, i < rows ? shape.head_dim : 0);
            of_v[b] = load_chunk(v + row * vs.token, lane, i < rows ? shape.head_dim_v : 0);
        }
        #pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int i = first + b * PARALLEL_ROWS;
            const i64 row = i64(first_row) + i;
            if (i < rows) {
                of_k[b] = load_last_chunk(k + row * ks.token, lane, shape.head_dim, of_k[b]);
                of_v[b] = load_last_chunk(v + row * vs.token, lane, shape.head_dim_v, of_v[b]);
            }
            const ChunkShare k_share = share_of(of_k[b]), v_share = share_of(of_v[b]);
            const float k_squares = row_sum(k_share.squares), v_squares = row_sum(v_share.squares);
            const bool is_own = i < own_rows, is_finite = k_squares + v_squares < infinity();
            own.k = fmaxf(own.k, !is_finite ? infinity() : is_own ? k_share.most : 0.0f);
            own.v = fmaxf(own.v, is_own ? v_squares : 0.0f);
            if (is_own && lane == 0 && k_squares > 0.0f && v_squares > 0.0f) {
                own.roots += 1.0f / (fourth_root(k_squares) * fourth_root(v_squares));
                own.keys += 1.0f;
            }
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
