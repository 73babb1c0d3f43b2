// Forward attention of few queries over a cache whose values are the first columns of its keys
// (latent attention), for 16-bit types on Hopper (sm_90a): warpgroup MMAs.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) K[:, :head_dim_v]
//
// As forward_sm90.cu, keys are split among blocks (parts.cuh), whose states finish/merge_parts.cu
// merges, and the rows of a tile are pairs of a query and a query head of the group. As in
// sm90/forward_wide.cu roles are divided, since O of 64 rows fills two warpgroups' registers:
//     0, producer    finds the block's parts; key tiles
//     1, scores      Q; S; the online softmax; P, with the factors by which acc is rescaled
//     2, values      acc += P V of the left half of V's columns
//     3, values      the same of the right half
//
//     tensor cores   S'  (P V, left and right)  S"  (P' V', left and right)
//     scores            P'                         P"
//
// A key tile is loaded once: V is there where K is. Each panel of 64 columns of it is free when the
// value warpgroups are done with it. P takes the place of a panel that is no values.
//
//     latent_shared.cuh      panels, SharedPlan
//     latent_producer.cuh    parts, key tiles
//     latent_scores.cuh      the score warpgroup
//     latent_recompute.cuh   rows that a masked NaN reached
//
// Cost of a key tile of 64 at 576 and 512 columns, at peak rates:
//     tensor cores     matmuls of 1,152 and 1,024 cycles: 2,176
//     shared memory    S: 144 KB; P V: 80 KB; keys arriving: 72 KB; in total 2,370 cycles
//     memory           72 KB for 8.9 MFLOP: 600 TFLOP/s read 4.9 TB/s, two row tiles half of it
//
// Bad at: few rows, as the tensor cores always have 64.
//
// Grid: parts.cuh. Block: 4 warpgroups.
//
// Constants: those of forward.cu but NUM_WARPS; BLOCK_Q = BLOCK_K = 64; KV_STAGES; HEAD_DIM and
// HEAD_DIM_V, rounded up to multiples of 64.
// Shared memory: SharedPlan, tiles as in smem.cuh.
#include "decode/latent_producer.cuh"
#include "decode/latent_recompute.cuh"
#include "decode/latent_scores.cuh"

// An SM's 64 K registers are 512 for the four threads of the same rank in the warpgroups, which
// begin with 128 each. The producer finds its parts without spilling.
constexpr int PRODUCER_REGISTERS = 96, VALUE_REGISTERS = 160;
constexpr int SCORE_REGISTERS = 512 - PRODUCER_REGISTERS - 2 * VALUE_REGISTERS;

// Calls compute(work) for each of the block's parts.
template <class Compute>
__device__ __forceinline__ void for_each_part(SharedPlan& shared, Compute compute) {
    for (PipelineState<WORKS> work;; work.next()) {
        pipeline_wait(shared_address(&shared.work_full), work);
        const Work& found = shared.works[work.index];
        if (found.part.count == 0) return;
        compute(found);
        __syncwarp();                                       // all lanes have read it
        mbarrier_arrive_if(threadIdx.x % 32 == 0, barrier_at(shared.work_empty, work.index));
    }
}

// ---- The value warpgroups ----

template <int COLUMNS, int FIRST_COLUMN>
struct ValueWarpgroup : HalfSums<COLUMNS, value_chunk(COLUMNS)> {
    using Half = HalfSums<COLUMNS, value_chunk(COLUMNS)>;
    static constexpr int FIRST_PANEL = FIRST_COLUMN / PANEL_COLUMNS;
    static constexpr int CHUNK_PANELS = Half::CHUNK / PANEL_COLUMNS;
    static constexpr bool MARKS = CAUSAL || WINDOW || PAIRWISE;     // tiles with masked pairs

    const Arguments& args;
    SharedPlan& shared;
    PipelineState<KV_STAGES> stage;
    bool exact = true;                                      // no row so far needs recompute_row

    __device__ __forceinline__ ValueWarpgroup(
        const Arguments& args, SharedPlan& shared, typename Half::Sums& sums)
        : Half(sums, FIRST_COLUMN), args(args), shared(shared) {}

    __device__ __forceinline__ void compute_part(const Work& work) {
        float m[2] = {-infinity(), -infinity()}, l[2] = {0.0f, 0.0f};
        const int num_tiles = max(work.tiles.end - work.tiles.first, 0);
        if (num_tiles == 0) this->clear();
        for (int i = 0; i < num_tiles; ++i, stage.next()) {
            pipeline_wait(shared_address(&shared.p_full), stage);
            const RowFactors& factors = shared.factors[stage.index];
            float rescale[2];
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = this->lane_row + half * 8;
                rescale[half] = factors.rescale[row];
                if (i + 1 < num_tiles) continue;
                m[half] = factors.m[row];
                l[half] = factors.l[row];
            }
            __syncwarp();                                   // all lanes have read the factors
            release_others();
            const bool rescales = rescale[0] != 1.0f || rescale[1] != 1.0f;
            if (i > 0 && __ballot_sync(WHOLE_WARP, rescales) != 0) this->multiply(rescale);
            add_product(i > 0);
        }
        store(work.part, m, l);
    }

private:
    // Panels that this warpgroup does not read, but for that of P.
    __device__ __forceinline__ void release_others() const {
        const int panel = this->lane;
        const bool is_own =
            panel >= FIRST_PANEL && panel < FIRST_PANEL + COLUMNS / PANEL_COLUMNS;
        const bool is_p = P_IN_KEYS && panel == PANELS - 1;
        mbarrier_arrive_if(panel < PANELS && !is_own && !is_p,
                           barrier_at(shared.empty, stage.index * PANELS + panel));
    }
    __device__ __forceinline__ void release_chunk(int chunk) const {
        const int panel = FIRST_PANEL + chunk * CHUNK_PANELS + this->lane;
        mbarrier_arrive_if(this->lane < CHUNK_PANELS,
                           barrier_at(shared.empty, stage.index * PANELS + panel));
    }

    // acc += P V, or acc = P V.
    __device__ __forceinline__ void add_product(bool accumulate) {
        const KeyStage& keys = shared.stages[stage.index];
        const u64 p = descriptor(keys.p(), 0);
        const u64 v = descriptor(
            shared_address(&keys.k) + FIRST_PANEL * PANEL_BYTES, PANEL_BYTES);
        this->fence_operands();
        wgmma_fence();
        #pragma unroll
        for (int chunk = 0; chunk < Half::CHUNKS; ++chunk) {
            gemm_ab_ss<Element, BLOCK_K>(
                this->sums[chunk], p, advance(v, chunk * CHUNK_PANELS * PANEL_BYTES), accumulate);
            wgmma_commit();
        }
        if constexpr (Half::CHUNKS > 1) {
            wgmma_wait<1>();
            release_chunk(0);
        }
        wgmma_wait<0>();
        this->fence_operands();
        release_chunk(Half::CHUNKS - 1);
        if (P_IN_KEYS)
            mbarrier_arrive_if(this->lane == 0,
                               barrier_at(shared.empty, stage.index * PANELS + PANELS - 1));
    }

    __device__ __forceinline__ void store(
        const Part& part, const float (&m)[2], const float (&l)[2]) {
        const RowTile rows(args, part);
        mark<0>(l[0]);
        mark<1>(l[1]);
        store_row<0>(part, rows, m[0], l[0]);
        store_row<1>(part, rows, m[1], l[1]);
    }
    // Marks the lane's row HALF for recompute_rows, by an infinity in its first column, if a masked
    // NaN or infinity may have reached it. Not where l is NaN: a row's values are columns of its
    // keys, so a visible NaN has made its score NaN, and all of O.
    template <int HALF> __device__ __forceinline__ void mark(float l) {
        if constexpr (MARKS) {
            const bool is_exact = l != l || this->template is_finite<HALF>();
            const u32 inexact = __ballot_sync(WHOLE_WARP, !is_exact);
            if ((inexact >> this->lane / 4 * 4 & 0xF) != 0) this->sums[0][HALF * 2] = infinity();
            exact &= inexact == 0;
        }
    }
    // The lane's columns of one of its rows.
    template <int HALF>
    __device__ __forceinline__ void store_row(
        const Part& part, const RowTile& rows, float m, float l) const {
        const int row = this->lane_row + HALF * 8;
        if (!rows.exists(row)) return;
        Result<float> result(args, part, rows, row, m, l);
        // A mark stays an infinity where it would be times 0: without a key, or beside a sink.
        if (MARKS && l == l && fabsf(this->sums[0][HALF * 2]) == infinity()) result.inverse = 1.0f;
        if (FIRST_COLUMN == 0 && this->lane % 4 == 0) {
            result.store_lse();
            if (MAX_SCORE) result.store_max_score(m, l);
        }
        #pragma unroll
        for (int chunk = 0; chunk < Half::CHUNKS; ++chunk)
            #pragma unroll
            for (int i = 0; i < Half::CHUNK / 4; ++i) {
                const int column = FIRST_COLUMN + chunk * Half::CHUNK + i / 2 * 8
                                 + this->lane % 4 * 2 + i % 2;
                if (column < args.arrays.shape.head_dim_v)
                    result.store(column, this->sums[chunk][i / 2 * 4 + HALF * 2 + i % 2]);
            }
    }
};

template <int COLUMNS, int FIRST_COLUMN>
__device__ __forceinline__ void compute_values(const Arguments& args, SharedPlan& shared) {
    using Warpgroup = ValueWarpgroup<COLUMNS, FIRST_COLUMN>;
    typename Warpgroup::Half::Sums sums;
    Warpgroup values(args, shared, sums);
    for_each_part(shared, [&](const Work& work) { values.compute_part(work); });
    __syncwarp();                                           // the warp's stores are done
    if (!values.exact && FIRST_COLUMN < args.arrays.shape.head_dim_v)
        recompute_rows<COLUMNS>(args, values.warp * 16, FIRST_COLUMN);
}

__device__ __forceinline__ void compute_scores(const Arguments& args, SharedPlan& shared) {
    float s[S_COUNT];
    ScoreWarpgroup scores(args, shared, s);
    for_each_part(shared, [&](const Work& work) {
        scores.compute_part(work);
        griddepcontrol_launch_dependents();                 // of finish/merge_parts.cu
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward_decode_latent(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();

    // By a shuffle, so that the compiler knows that it is uniform in the warp.
    const int role = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0);
    if (role == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        LatentProducer(args, shared).run();
    } else if (role == 1) {
        warpgroup_reg_dealloc<SCORE_REGISTERS>();
        compute_scores(args, shared);
    } else {
        warpgroup_reg_alloc<VALUE_REGISTERS>();
        if (role == 2) compute_values<LEFT_COLUMNS, 0>(args, shared);
        else compute_values<RIGHT_COLUMNS, LEFT_COLUMNS>(args, shared);
    }
}
