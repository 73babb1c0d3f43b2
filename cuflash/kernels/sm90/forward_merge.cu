// Merges the parts of forward.cu's last query tiles (forward_key_parts.cuh).
//
//     m = max m_p,  l = sum_p l_p 2^(c m_p - c m),  O = sum_p O_p l_p 2^(c m_p - c m) / l
//
// p: the parts of a row's tile, merged one after another. c = scale log2(e).
// lse = |scale| m + log(l).
//
// Grid: a warp for each row of these tiles. Block: NUM_WARPS. A lane has two neighbouring columns
// at a time.
//
// Constants: those of forward.cu, whose grid has MAIN_BLOCKS.
#include "sm90/forward_recompute.cuh"

constexpr int PAIRS = HEAD_DIM_V / 2, LANE_PAIRS = (PAIRS + 31) / 32;
static_assert(BLOCK_Q % NUM_WARPS == 0, "a block's rows are of one tile");

// A row of a divided query tile: what its parts left.
struct DividedRow {
    const Arguments& args;
    int tile, row, first, last;                             // blocks that have parts
    __device__ __forceinline__ DividedRow(
        const Arguments& args, const KeyShares& shares, int tile, int row)
        : args(args), tile(tile), row(row), first(shares.first_block(tile)),
          last(shares.last_block(tile)) {}
    __device__ __forceinline__ float* slot(int block) const {
        return memory_of_slot(args, slot_of_part(block, tile));
    }
    __device__ __forceinline__ RowPart part(int block) const {
        return rows_of_slot(slot(block))[row];
    }
    __device__ __forceinline__ ColumnPair columns(int block, int pair) const {
        return reinterpret_cast<const ColumnPair*>(slot(block) + row * HEAD_DIM_V)[pair];
    }
};

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32)
forward_sm90_merge(const __grid_constant__ Arguments args) {
    const KeyShares shares(args, MAIN_BLOCKS);
    const int lane = threadIdx.x % 32;
    const int number = blockIdx.x / (BLOCK_Q / NUM_WARPS);  // of the tile, among those divided
    const int row = blockIdx.x % (BLOCK_Q / NUM_WARPS) * NUM_WARPS + threadIdx.x / 32;
    const QueryTile tile =
        make_query_tile(coord_of_item(args, shares.whole + number), {}, args);
    if (row >= tile.num_rows) return;
    const ForwardArguments& arrays = args.arrays;
    const float scale_log2 = exponent_scale<LINEAR>(arrays.scale);
    const DividedRow divided(args, shares, number, row);
    griddepcontrol_wait();
    float m = -infinity(), l = 0.0f;
    ColumnPair o[LANE_PAIRS] = {};
    #pragma unroll 2                                        // loads in flight
    for (int block = divided.first; block <= divided.last; ++block) {
        const RowPart part = divided.part(block);
        const float old = m;
        m = fmaxf(m, part.max);
        const float rescale =                               // with scale 0, -inf c would be NaN
            block == divided.first ? 0.0f : exp2_approx((old - m) * scale_log2);
        const float weight = part.sum * exp2_approx((part.max - m) * scale_log2);
        l = l * rescale + weight;
        #pragma unroll
        for (int i = 0; i < LANE_PAIRS; ++i) {
            if (i * 32 + lane >= PAIRS) continue;
            const ColumnPair pair = divided.columns(block, i * 32 + lane);
            o[i].x = o[i].x * rescale + weight * pair.x;
            o[i].y = o[i].y * rescale + weight * pair.y;
        }
    }
    const float inverse = 1.0f / l;
    Element* out = out_of(arrays, tile) + row * arrays.out_stride.token;
    float* lse = lse_of(arrays, tile);
    // A part that is not exact begins with a NaN (normalise).
    const float first = __shfl_sync(WHOLE_WARP, o[0].x * inverse, 0);
    if (!(fabsf(first) <= infinity())) {
        recompute_row(args, tile.q_start + row, tile.head, tile.batch, scale_log2, out,
                      lse == nullptr ? lse : lse + row, nullptr);
        return;
    }
    #pragma unroll
    for (int i = 0; i < LANE_PAIRS; ++i)
        if ((i * 32 + lane) * 2 < arrays.shape.head_dim_v)
            reinterpret_cast<u32*>(out)[i * 32 + lane] =
                pack<Element>(o[i].x * inverse, o[i].y * inverse);
    if (lse != nullptr && lane == 0)
        lse[row] = fabsf(static_cast<float>(arrays.scale)) * m + logf(l);
}
