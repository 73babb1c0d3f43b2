// forward.cu and forward_wide.cu: constants, and the data that the producer publishes to the
// consumers.
#pragma once
#include "score/dropout.cuh"
#include "common/mask.cuh"
#include "score/pair_mask.cuh"
#include "common/softmax.cuh"
#include "score/score_mod.cuh"
#include "common/packed_sequences.cuh"
#include "sm90/consumer_constants.cuh"
#include "sm90/pipeline.cuh"

constexpr int WIDEST = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;

// SPARSE_TILES: the visited key tiles need not be contiguous, or a tile's mask is not implied by
// its position; the producer publishes each key tile's index and flags. DYNAMIC_SCHEDULER: blocks
// take query tiles from an atomic counter.
constexpr bool SPARSE_TILES = PAIRWISE;
constexpr bool DYNAMIC_SCHEDULER = PACKED || SKIPS_TILES;
constexpr bool OPTIONS = WINDOW || SPARSE_TILES || !LINEAR || DROPOUT;
constexpr bool MASKED = CAUSAL || WINDOW || SPARSE_TILES || PACKED;     // some pairs may be masked

static_assert(!(PACKED && (BIAS || PAIRWISE)),
              "packed sequences support no bias, mask or segment ids");
static_assert(BLOCK_Q == CONSUMER_WARPGROUPS * CONSUMER_ROWS && CONSUMER_WARPGROUPS <= 3,
              "one, two or three consumer warpgroups");
static_assert(BLOCK_K % 16 == 0 && HEAD_DIM % 16 == 0, "an MMA sums over 16 elements");

// ---- Query tiles ----

// Queries [q_start, q_start + num_rows) of a head, counted from the first token of its packed
// sequence. num_rows = 0: no tile is left.
struct QueryTile : TileSequence { int q_start, num_rows, head, batch; };

// A query tile and the end of the key tiles that it visits, which start at the first key that its
// first query sees. At least one is visited, even if it is fully masked.
struct WholeTile : QueryTile {
    int num_visited;
    static constexpr int first = 0, slot = -1;
};
// KEY_PARTS: of key tiles from `first` on. slot: of a part (forward_key_parts.cuh), -1: all keys.
struct PartOfTile : WholeTile { int first, slot; };
template <bool> struct WorkTileOf { using type = WholeTile; };
template <> struct WorkTileOf<true> { using type = PartOfTile; };
using WorkTile = WorkTileOf<KEY_PARTS>::type;

// A work slot holds a tile from the load of its Q until its rows are stored.
constexpr int WORK_SLOTS = Q_STAGES > 1 ? Q_STAGES : 2;
__device__ __forceinline__ int work_slot(PipelineState<Q_STAGES> q) {
    return Q_STAGES > 1 ? q.index : static_cast<int>(q.phase);
}

// Dynamic scheduler: the Q producer publishes each work tile (`full`); the K/V producer requests
// the next one (`requested`). One arrival each. The request comes late in a tile: a tile taken
// early would wait for this one, while other blocks may be idle. With segment ids it comes when the
// last key tile has been looked up, with packed sequences when REQUEST_AHEAD key tiles are still to
// be loaded. Computing those and the ones in shared memory takes an iteration or two longer than
// the latency of the request: an atomic addition, a search among offsets and a load of Q.
constexpr int REQUEST_AHEAD = 2;
template <bool> struct WorkTileBarriers {
    __device__ __forceinline__ void init() {}
    __device__ __forceinline__ void publish(int) {}
    __device__ __forceinline__ void acquire(int, u32) {}
    __device__ __forceinline__ void request() {}
    __device__ __forceinline__ void wait_for_request(u32) {}
};
template <> struct WorkTileBarriers<true> {
    u64 full[WORK_SLOTS], requested;
    __device__ __forceinline__ void init() {
        for (u64& barrier : full) mbarrier_init(shared_address(&barrier), 1);
        mbarrier_init(shared_address(&requested), 1);
    }
    __device__ __forceinline__ void publish(int slot) {
        mbarrier_arrive(shared_address(&full[slot]));
    }
    __device__ __forceinline__ void acquire(int slot, u32 phase) {
        mbarrier_wait(shared_address(&full[slot]), phase);
    }
    __device__ __forceinline__ void request() { mbarrier_arrive(shared_address(&requested)); }
    __device__ __forceinline__ void wait_for_request(u32 phase) {
        mbarrier_wait(shared_address(&requested), phase);
    }
};
struct WorkTiles : WorkTileBarriers<DYNAMIC_SCHEDULER> {
    WorkTile tiles[WORK_SLOTS];
    __device__ __forceinline__ WorkTile& operator[](int slot) { return tiles[slot]; }
};

// ---- What accompanies a key tile ----

// SPARSE_TILES: the producer writes the flags before the phase of K's barrier completes; consumers
// read them before they release K.
struct TileFlags {
    static constexpr int LAST_BIT = 1, MASKED_BIT = 2, ONE_ID_BIT = 4;
    static constexpr int PARTLY_BIT = 8, NEXT_MASKED_BIT = 16;      // with MASK_MOD
    static constexpr int HIDDEN_BITS = 5;                           // from here on, one each
    static constexpr int TILE_SHIFT = MASK_MOD ? HIDDEN_BITS + HIDDEN_GROUPS : 3;
    int bits;
    __device__ __forceinline__ int tile() const { return bits >> TILE_SHIFT; }
    __device__ __forceinline__ bool is_last() const { return (bits & LAST_BIT) != 0; }
    // With SEGMENTS: its segment ids are published, and must be compared.
    __device__ __forceinline__ bool is_masked() const { return (bits & MASKED_BIT) != 0; }
    // All its keys have the same segment id.
    __device__ __forceinline__ bool has_one_id() const { return (bits & ONE_ID_BIT) != 0; }
    // The user's mask hides some of its pairs.
    __device__ __forceinline__ bool is_partly() const { return (bits & PARTLY_BIT) != 0; }
    // The queries of consumer warpgroup `warpgroup` see nothing of it.
    __device__ __forceinline__ bool is_hidden(int warpgroup) const {
        return HIDDEN_GROUPS > 0 && (bits >> (HIDDEN_BITS + warpgroup) & 1) != 0;
    }
    // Something may mask pairs of the next key tile.
    __device__ __forceinline__ bool next_is_masked() const {
        return (bits & NEXT_MASKED_BIT) != 0;
    }
};

// Segment ids of keys, published with K of a tile that has the MASKED flag. Consumers read them
// after they release K, so there are twice as many stages of ids as of K, the second half for K's
// odd phases. The producer writes the ids of tile n + KV_STAGES over those of tile n - KV_STAGES
// after all consumers have released K of tile n: by then they have finished tile n - 1.
template <bool> struct KeySegmentIds {
    __device__ __forceinline__ int* ids(PipelineState<KV_STAGES>) { return nullptr; }
};
template <> struct KeySegmentIds<true> {
    alignas(8) int id_stages[2 * KV_STAGES][BLOCK_K];
    __device__ __forceinline__ int* ids(PipelineState<KV_STAGES> k) {
        return id_stages[static_cast<int>(k.phase) * KV_STAGES + k.index];
    }
};

// 16-bit biases of a warp's 16 rows and a key tile, copied by cp.async in chunks of 8 keys if the
// array is aligned for that. The copy runs while S is computed. With BIAS_PREFETCH (the next key
// tile is known) it starts once the previous tile's biases have been read, so it overlaps the
// softmax too. A row is padded by 16 bytes, which puts the 8 rows of one ldmatrix in different
// banks.
constexpr bool STAGED_BIAS = BIAS && sizeof(Bias) == 2 && WIDEST <= 256;
constexpr bool BIAS_PREFETCH = STAGED_BIAS && !SPARSE_TILES;
constexpr int BIAS_CHUNKS = (BLOCK_K + 31) / 32 * 4, BIAS_PITCH = BIAS_CHUNKS + 1;
template <bool> struct BiasTiles {};
template <> struct BiasTiles<true> { BiasChunk biases[CONSUMER_WARPS][16][BIAS_PITCH]; };

struct KeyTileExtras : BiasTiles<STAGED_BIAS>, KeySegmentIds<SEGMENTS> {
    TileFlags flags[SPARSE_TILES ? KV_STAGES : 1];
};
