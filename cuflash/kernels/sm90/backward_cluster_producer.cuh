// Producers of sm90/backward_cluster.cu: as in backward_producer.cuh, for the blocks of a cluster.
//
// A work tile is a pair of key tiles, of which the block has the one of its rank: `tile` is the
// first. Both blocks visit the query tiles that see keys of the pair. Block 0 takes indices from
// the counter and sends each work tile to block 1.
//
// Each block loads half of the columns of Q and dO for both. So a stage is empty when the readers
// of both blocks have read it.
#pragma once
#include "sm90/backward_producer.cuh"

// ---- Clusters ----

static_assert(CLUSTER_BLOCKS == 2, "a block has one peer");

// An address in the other block's shared memory.
__device__ __forceinline__ u32 peer_address(u32 address) {
    return shared_of_rank(address, cluster_rank() ^ 1);
}
// Arrives at a barrier of this block and at the other's of the same name.
__device__ __forceinline__ void arrive_in_both(bool condition, u32 barrier) {
    mbarrier_arrive_if(condition, barrier);
    mbarrier_arrive_in_cluster_if(condition, peer_address(barrier));
}

// ---- Work tiles ----

struct alignas(16) SentWorkTile : WorkTile { int padding; };

__device__ __forceinline__ int num_pairs(const Arguments& args) {
    return num_works<CLUSTER_BLOCKS>(args);
}
// Pairs have flags, not key tiles: a query tile that one of two sees has reached both. To
// finish/dq.cu, BLOCK_K is a pair's.
__device__ __forceinline__ int* recompute_flag_of_pair(const Arguments& args, WorkTile work) {
    const BackwardArguments& arrays = args.arrays;
    return arrays.recompute_flags
         + (work.batch * arrays.shape.num_heads_kv + work.head) * num_pairs(args)
         + work.tile / CLUSTER_BLOCKS;
}

// As next_index() and first_index().
__device__ __forceinline__ int next_pair(const Arguments& args) {
    return (DETERMINISTIC ? 0 : gridDim.x / CLUSTER_BLOCKS)
         + atomicAdd(arrays_of(args).tile_counter, 1);
}
__device__ __forceinline__ int first_pair(const Arguments& args) {
    return DETERMINISTIC ? next_pair(args) : blockIdx.x / CLUSTER_BLOCKS;
}
// The work tile of an index; its tile is -1 after the last.
__device__ __forceinline__ WorkTile pair_at(const Arguments& args, int index) {
    const Shape& shape = args.arrays.shape;
    const int pairs = num_pairs(args);
    if (index >= pairs * shape.num_heads_kv * shape.batch) return {-1, 0, 0};
    WorkTile work =
        tile_of_block(index, pairs, shape.num_heads_kv, shape.batch, args.arrays.schedule);
    if (LAST_KEYS_FIRST) order_keys(args, pairs, work);
    work.tile *= CLUSTER_BLOCKS;
    return work;
}

// Block 1 is ready to receive a work tile: its readers have read what stood there.
template <class Shared>
__device__ __forceinline__ WorkTile receive_work_tile(Shared& shared, WorkState state) {
    const int stage = state.stage();
    mbarrier_wait(shared_address(&shared.work_empty[stage]), state.phase() ^ 1);
    mbarrier_arrive_expect(shared_address(&shared.work_full[stage]), sizeof(SentWorkTile));
    mbarrier_arrive_in_cluster_if(true, peer_address(shared_address(&shared.work_ready[stage])));
    mbarrier_wait(shared_address(&shared.work_full[stage]), state.phase());
    return shared.work_tiles[stage];
}
template <class Shared>
__device__ __forceinline__ void send_work_tile(
    Shared& shared, WorkState state, const WorkTile& work) {
    const int stage = state.stage();
    mbarrier_wait(shared_address(&shared.work_empty[stage]), state.phase() ^ 1);
    mbarrier_wait(shared_address(&shared.work_ready[stage]), state.phase());
    static_cast<WorkTile&>(shared.work_tiles[stage]) = work;
    shared.work_tiles[stage].padding = 0;
    fence_async_proxy();
    const u32 tile = shared_address(&shared.work_tiles[stage]);
    const u32 full = shared_address(&shared.work_full[stage]);
    copy_to_block(peer_address(tile), tile, peer_address(full), sizeof(SentWorkTile));
    mbarrier_arrive(full);
}

// ---- Loads ----

// Half of the columns, to both blocks; the other block loads the other half.
template <int COLUMNS>
__device__ __forceinline__ void load_shared_tile(
    u32 tile, const TensorMap& map, u32 full, int token, int head, int batch, int more) {
    constexpr int PANELS = COLUMNS / PANEL_COLUMNS / CLUSTER_BLOCKS;
    constexpr u32 BOTH = 3;
    mbarrier_arrive_expect(full, BLOCK_Q * COLUMNS * 2 + more);
    #pragma unroll
    for (int i = 0; i < PANELS; ++i) {
        const int panel = cluster_rank() * PANELS + i;
        tma_load_multicast(tile + panel * BLOCK_Q * PANEL_ROW_BYTES, map, full, BOTH,
                           panel * PANEL_COLUMNS, token, head, batch);
    }
}

// One iteration's Q, rows and dO.
template <class Shared>
__device__ __forceinline__ void load_query_tile_in_cluster(
    const Arguments& args, Shared& shared, PipelineState<STAGES> stage, const WorkTile& work,
    const QueryTileIterator& it) {
    mbarrier_wait(shared_address(&shared.q_empty[stage.index]), stage.phase ^ 1);
    const u32 q_full = shared_address(&shared.q_full[stage.index]);
    const u32 dout_full = shared_address(&shared.dout_full[stage.index]);
    const int token = it.tile * BLOCK_Q;
    load_shared_tile<HEAD_DIM>(shared_address(&shared.q[stage.index]), args.q_map, q_full, token,
                               it.head, work.batch, sizeof(QueryRows));
    bulk_load(shared_address(&shared.rows[stage.index]),
              static_cast<const QueryRows*>(args.arrays.delta)
                  + query_tile_index(args, NoSequence{}, work.batch, it.head, it.tile),
              q_full, sizeof(QueryRows));
    mbarrier_wait(shared_address(&shared.dout_empty[stage.index]), stage.phase ^ 1);
    load_shared_tile<HEAD_DIM_V>(shared_address(&shared.dout[stage.index]), args.dout_map,
                                 dout_full, token, it.head, work.batch, 0);
}

// The Q producer, one thread. Block 0 requests the next index before a tile's last query tile.
template <class Shared>
__device__ __forceinline__ void produce_queries_in_cluster(const Arguments& args, Shared& shared) {
    const bool leads = cluster_rank() == 0;
    PipelineState<STAGES> stage;
    WorkState state;
    for (int index = leads ? first_pair(args) : 0;; ++state.count) {
        WorkTile work;
        if (leads) {
            work = pair_at(args, index);
            send_work_tile(shared, state, work);
        } else {
            work = receive_work_tile(shared, state);
        }
        if (work.tile < 0) return;
        QueryTileIterator it(args, query_tiles(args, work.tile, NoSequence{}), work);
        for (; it.remaining > 0; it.next(args, work), stage.next()) {
            if (leads && it.remaining == 1) index = next_pair(args);
            load_query_tile_in_cluster(args, shared, stage, work, it);
        }
    }
}

// The K/V producer, one thread: the block's keys, and the columns of the other block's K that are
// operands of the block's part of dQ.
template <class Shared>
__device__ __forceinline__ void produce_keys_in_cluster(const Arguments& args, Shared& shared) {
    const int rank = cluster_rank();
    for (WorkState state;; ++state.count) {
        const WorkTile work = acquire_work_tile(shared, state);
        if (work.tile < 0) return;
        mbarrier_arrive(shared_address(&shared.work_empty[state.stage()]));
        mbarrier_wait(shared_address(&shared.kv_empty), state.kv_phase() ^ 1);
        const int own = (work.tile + rank) * BLOCK_K, others = (work.tile + (rank ^ 1)) * BLOCK_K;
        tma_load_tile<BLOCK_K, HEAD_DIM>(
            shared_address(&shared.k), args.k_map, shared_address(&shared.k_full), own, work.head,
            work.batch);
        tma_load_tile<BLOCK_K, HEAD_DIM_V>(
            shared_address(&shared.v), args.v_map, shared_address(&shared.v_full), own, work.head,
            work.batch);
        constexpr int COLUMNS = HEAD_DIM / CLUSTER_BLOCKS;
        tma_load_tile<BLOCK_K, COLUMNS>(
            shared_address(&shared.peer_k), args.k_map, shared_address(&shared.peer_k_full),
            others, work.head, work.batch, 0, rank * COLUMNS);
    }
}
