// Merges what the blocks of a decode kernel computed of the same row from parts of the keys, in the
// order of the parts (merged_row.cuh), and adds the head's sink.
//
// Grid: a run's BLOCKS_OF_RUN blocks, one run after the other: a run for each row tile, or, if
// parts are balanced and row tiles are more, for each block of the decode kernel (parts.cuh).
// Block: MERGE_SLOTS rows at once, each of which has a warp for each 32 COLUMNS columns.
//
// Balanced parts are found by hundreds of instructions. One warp of a block finds the row tile, and
// the block merges up to ROWS_OF_BLOCK of its rows.
//
// Constants: Element, MERGE_ROWS, the most rows of a row tile that exist; RUNS_OF_BLOCKS, whether
// runs are those of the decode kernel's blocks; MERGE_SLOTS, ROWS_OF_BLOCK; NUM_WARPS, of all
// slots; BLOCK_Q, BLOCK_K, CAUSAL, BALANCED, those of a KV cache (constants.cuh), SINK, WINDOW;
// Arguments. Shared memory: FoundRowTile.
//
// Bound by latency: the parts are in L2. So a lane has the loads of many parts under way, and the
// kernel starts before the parts are there (Launch.overlaps).
#include "common/merged_row.cuh"
#include "decode/results.cuh"

using Real = Accumulator<Element>;

constexpr int COLUMNS = 2;                                  // of a lane

// max_score of a row's parts, in all lanes of a warp. l: NaN if one is NaN, as the sum of the row.
template <class Real> struct MergedMax {
    Real m = -Real(infinity()), l = 0;
    __device__ __forceinline__ void add(Real of_part) {
        m = fmax(m, max_of_lanes<32>(of_part));
        if (__ballot_sync(WHOLE_WARP, of_part != of_part) != 0) l = Real(quiet_nan());
    }
};

constexpr int THREADS_OF_ROW = NUM_WARPS / MERGE_SLOTS * 32;
constexpr int BLOCKS_OF_RUN = (MERGE_ROWS + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK;

struct FoundRowTile {
    Part part;
    bool is_cut;
};
static_assert(MERGE_SLOTS == 1 || sizeof(FoundRowTile) <= SHARED_BYTES,
              "the plan and the kernel disagree");

// The block's row tile. Returns whether it is cut. Whole block.
__device__ __forceinline__ bool find_row_tile(const Arguments& args, Part& part) {
    const int run = blockIdx.x / BLOCKS_OF_RUN;
    if constexpr (MERGE_SLOTS == 1) {
        return Parts::find_cut_row_tile<RUNS_OF_BLOCKS>(args, run, part);
    } else {
        extern __shared__ __align__(16) unsigned char shared_bytes[];
        FoundRowTile& found = *reinterpret_cast<FoundRowTile*>(shared_bytes);
        if (threadIdx.x < 32) {
            const bool is_cut = Parts::find_cut_row_tile<RUNS_OF_BLOCKS>(args, run, part);
            if (threadIdx.x == 0) found = {part, is_cut};
        }
        __syncthreads();
        part = found.part;
        return found.is_cut;
    }
}

// The parts of one row. `thread`: of the row's.
__device__ __forceinline__ void merge_row(
    const Arguments& args, const Part& part, const RowTile& rows, int row, int thread) {
    const int head_dim_v = args.arrays.shape.head_dim_v, lane = threadIdx.x % 32;
    const int first_column = thread / 32 * 32 * COLUMNS + lane;
    const Real* numbers = static_cast<const Real*>(args.split_lse) + row * PART_NUMBERS;
    const Real* out = static_cast<const Real*>(args.split_out) + i64(row) * head_dim_v;
    MergedRow<Real, COLUMNS> merged;
    MergedMax<Real> max_score;
    for (int first = 0; first < part.count; first += 32) {
        const int parts = min(part.count - first, 32);
        const auto number = [&](int i) {                    // of the lane's part
            return lane < parts ? numbers[part.slot(first + lane) * BLOCK_Q * PART_NUMBERS + i]
                                : -Real(infinity());
        };
        if constexpr (MAX_SCORE) max_score.add(number(1));
        merged.add(parts, number(0),
                   [&](int p, int i) {
                       const int column = first_column + i * 32;
                       const i64 index = part.slot(first + p) * BLOCK_Q * head_dim_v + column;
                       return column < head_dim_v ? out[index] : Real(0);
                   });
    }
    const Result<Real> result(args, part, rows, row, merged.m, merged.sum, true);
    if (thread == 0) result.store_lse();
    if (MAX_SCORE && thread == 0) result.store_max_score(max_score.m, max_score.l);
    #pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        const int column = first_column + i * 32;
        if (column < head_dim_v) result.store(column, merged.column(i));
    }
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32)
merge_parts(const __grid_constant__ Arguments args) {
    // In one block, even if it has no parts: this kernel's end must imply that of the one before,
    // whose results the next kernel reads.
    if (blockIdx.x == 0) griddepcontrol_wait();

    Part part;
    if (!find_row_tile(args, part)) return;
    const RowTile rows(args, part);
    const int first = blockIdx.x % BLOCKS_OF_RUN * ROWS_OF_BLOCK;
    if (!rows.exists(first)) return;

    griddepcontrol_wait();                                  // for the parts

    const int slot = threadIdx.x / THREADS_OF_ROW;
    for (int row = first + slot; row < min(first + ROWS_OF_BLOCK, MERGE_ROWS); row += MERGE_SLOTS)
        if (rows.exists(row)) merge_row(args, part, rows, row, threadIdx.x % THREADS_OF_ROW);
}
