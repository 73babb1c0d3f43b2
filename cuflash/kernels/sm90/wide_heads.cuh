// What the kernels for head dimensions above 256 share (sm90/forward_wide.cu, backward_passes.cu,
// decode/forward_latent.cu).
// A score warpgroup computes a product A B^T of two tiles that sums over head_dim; two others each
// have half of the columns of 64 rows of sums += W B, whose W the first one publishes in shared
// memory. B comes in chunks of columns, through rings of stages that a producer thread fills.
#pragma once
#include "common/softmax.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/wgmma.cuh"

constexpr int ROLE_WARPS = WARPGROUP / 32;

// Columns of a tile that a product A B^T sums over at a time.
constexpr int sum_chunk(int columns) {
    return PANEL_COLUMNS * (columns / PANEL_COLUMNS % 2 == 0 ? 2 : 1);
}

// Columns of the left half, whole panels; the right one has the rest.
constexpr int left_columns(int columns) {
    return (columns / PANEL_COLUMNS + 1) / 2 * PANEL_COLUMNS;
}

// Columns of V of an MMA, of a half's: ptxas refuses one of 256 columns in a kernel of 512 threads,
// which starts with 128 registers for each.
constexpr int value_chunk(int columns) { return columns > 192 ? 128 : columns; }

// Barriers of a ring. full: a producer thread arrives and the TMA unit adds a chunk's bytes. empty:
// each warp of the warpgroup that reads arrives.
template <int STAGES_> struct RingBarriers {
    u64 full[STAGES_], empty[STAGES_];
    __device__ __forceinline__ void init() {
        for (int i = 0; i < STAGES_; ++i) {
            mbarrier_init(shared_address(&full[i]), 1);
            mbarrier_init(shared_address(&empty[i]), ROLE_WARPS);
        }
    }
};

// Chunks of ROWS rows and up to COLUMNS columns.
template <int ROWS_, int COLUMNS_, int STAGES_> struct ChunkRing {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, STAGES = STAGES_;
    using State = PipelineState<STAGES>;
    using Barriers = RingBarriers<STAGES>;
    SmemTile<ROWS, COLUMNS> stages[STAGES];
};

// ---- Producer ----

// Loads COLUMNS columns of a tile, from first_column on, in chunks of CHUNK. `more`: bytes of other
// copies that arrive with the first chunk, which first() starts.
template <int COLUMNS, int CHUNK, class Ring, class First>
__device__ __forceinline__ void load_chunks(
    Ring& ring, typename Ring::Barriers& barriers, typename Ring::State& stage,
    const TensorMap& map, int first_column, int token, int head, int batch, int more,
    First first) {
    static_assert(CHUNK <= Ring::COLUMNS && COLUMNS % CHUNK == 0, "chunks fit their stages");
    for (int column = 0; column < COLUMNS; column += CHUNK, stage.next()) {
        const u32 full = barrier_at(barriers.full, stage.index);
        mbarrier_wait(barrier_at(barriers.empty, stage.index), stage.phase ^ 1);
        if (column == 0) first(full);
        tma_load_tile<Ring::ROWS, CHUNK>(
            shared_address(&ring.stages[stage.index]), map, full, token, head, batch,
            column == 0 ? more : 0, first_column + column);
    }
}
template <int COLUMNS, int CHUNK, class Ring>
__device__ __forceinline__ void load_chunks(
    Ring& ring, typename Ring::Barriers& barriers, typename Ring::State& stage,
    const TensorMap& map, int first_column, int token, int head, int batch) {
    load_chunks<COLUMNS, CHUNK>(
        ring, barriers, stage, map, first_column, token, head, batch, 0, [](u32) {});
}

// ---- Score warpgroup ----

// D = SIGN A B^T over COLUMNS columns; A has 64 rows. One of them, at `kept`, is whole, the other
// (A if CHUNKS_OF_A) comes in chunks, which are released when their MMAs are done.
template <typename Element, int SIGN, int COLUMNS, int CHUNK, bool CHUNKS_OF_A = false, class Ring,
          int COUNT>
__device__ __forceinline__ void gemm_by_chunks(
    float (&d)[COUNT], u32 kept, Ring& ring, typename Ring::Barriers& barriers,
    typename Ring::State& stage, int lane) {
    const u64 whole = descriptor(kept, 0);
    const u64 chunks = descriptor(shared_address(&ring.stages), 0);
    #pragma unroll
    for (int chunk = 0; chunk < COLUMNS / CHUNK; ++chunk) {
        mbarrier_wait(barrier_at(barriers.full, stage.index), stage.phase);
        if (chunk == 0) warpgroup_fence_operand(d);
        wgmma_fence();
        const u64 x = advance(whole, chunk * num_panels(CHUNK) * WGMMA_M * PANEL_ROW_BYTES);
        const u64 y = advance(chunks, stage.index * static_cast<int>(sizeof(ring.stages[0])));
        if constexpr (CHUNKS_OF_A)
            gemm_abt_ss<Element, SIGN, Ring::ROWS, WGMMA_M, CHUNK>(d, y, x, chunk > 0);
        else
            gemm_abt_ss<Element, SIGN, WGMMA_M, Ring::ROWS, CHUNK>(d, x, y, chunk > 0);
        wgmma_commit();
        if (chunk > 0) {
            wgmma_wait<1>();
            mbarrier_arrive_if(lane == 0, barrier_at(barriers.empty, stage.previous()));
        }
        stage.next();
    }
    wgmma_wait<0>();
    warpgroup_fence_operand(d);
    mbarrier_arrive_if(lane == 0, barrier_at(barriers.empty, stage.previous()));
}

// ---- The warpgroup of a half ----

// COLUMNS columns of 64 rows of sums, from first_column on, CHUNK at a time.
template <int COLUMNS, int CHUNK_> struct HalfSums {
    static constexpr int CHUNK = CHUNK_, CHUNKS = COLUMNS / CHUNK;
    static_assert(COLUMNS % CHUNK == 0, "whole chunks");
    using Sums = float[CHUNKS][CHUNK / 2];

    Sums& sums;                                             // not a member: as Fragments
    const int first_column;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % ROLE_WARPS;
    const int lane_row = warp * 16 + lane / 4;

    __device__ __forceinline__ HalfSums(Sums& sums, int first_column)
        : sums(sums), first_column(first_column) {}

    __device__ __forceinline__ void fence_operands() {
        #pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) warpgroup_fence_operand(sums[chunk]);
    }

    // Multiplies the lane's two rows.
    __device__ __forceinline__ void multiply(const float (&factors)[2]) {
        #pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            #pragma unroll
            for (int i = 0; i < CHUNK / 2; ++i) sums[chunk][i] *= factors[i / 2 % 2];
    }
    __device__ __forceinline__ void clear() {
        #pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            #pragma unroll
            for (int i = 0; i < CHUNK / 2; ++i) sums[chunk][i] = 0.0f;
    }
    // Of the lane's row HALF, or of both.
    template <int HALF = 2> __device__ __forceinline__ bool is_finite() const {
        bool finite = true;
        #pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            #pragma unroll
            for (int i = 0; i < CHUNK / 2; ++i)
                if (HALF == 2 || i / 2 % 2 == HALF) finite &= fabsf(sums[chunk][i]) < infinity();
        return finite;
    }
    // Rounds the rows and stores them to an array of num_columns columns. `tile`: the tile's first
    // row there. `aligned`: the array's rows are, to 16 bytes.
    template <typename Element>
    __device__ __forceinline__ void store(
        Element* tile, i64 stride, int num_rows, int num_columns, bool aligned = true) const {
        Element* first = tile + lane_row * stride + first_column;
        #pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            store_to_array(first + chunk * CHUNK, stride, sums[chunk], lane_row, num_rows,
                           num_columns - first_column - chunk * CHUNK, aligned);
    }
};

// The same sums, whose B comes through a ring, in chunks of Ring::COLUMNS columns.
template <int COLUMNS, class Ring> struct ColumnHalf : HalfSums<COLUMNS, Ring::COLUMNS> {
    using Half = HalfSums<COLUMNS, Ring::COLUMNS>;

    Ring& ring;
    typename Ring::Barriers& barriers;
    typename Ring::State stage;

    __device__ __forceinline__ ColumnHalf(
        typename Half::Sums& sums, Ring& ring, typename Ring::Barriers& barriers,
        int first_column)
        : Half(sums, first_column), ring(ring), barriers(barriers) {}

    // sums += W B, or sums = W B if not `accumulate`; W is a tile of 64 rows, or of 64 columns that
    // are its transpose's rows.
    template <bool TRANSPOSED = false, typename Element>
    __device__ __forceinline__ void add_product(u64 w, bool accumulate, Element) {
        const u64 b = descriptor(shared_address(&ring.stages), Ring::ROWS * PANEL_ROW_BYTES);
        #pragma unroll
        for (int chunk = 0; chunk < Half::CHUNKS; ++chunk) {
            mbarrier_wait(barrier_at(barriers.full, stage.index), stage.phase);
            if (chunk == 0) this->fence_operands();
            wgmma_fence();
            const u64 of_chunk =
                advance(b, stage.index * static_cast<int>(sizeof(ring.stages[0])));
            if constexpr (TRANSPOSED)
                gemm_atb_ss<Element, Ring::ROWS>(this->sums[chunk], w, of_chunk, accumulate);
            else
                gemm_ab_ss<Element, Ring::ROWS>(this->sums[chunk], w, of_chunk, accumulate);
            wgmma_commit();
            if (chunk > 0) {
                wgmma_wait<1>();
                mbarrier_arrive_if(this->lane == 0, barrier_at(barriers.empty, stage.previous()));
            }
            stage.next();
        }
        wgmma_wait<0>();
        this->fence_operands();
        mbarrier_arrive_if(this->lane == 0, barrier_at(barriers.empty, stage.previous()));
    }
};
