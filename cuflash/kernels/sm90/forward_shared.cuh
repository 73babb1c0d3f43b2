// forward.cu's constants, what its producer publishes, and its plan of shared memory.
#pragma once
#include "score/dropout.cuh"
#include "common/mask.cuh"
#include "score/pair_mask.cuh"
#include "common/softmax.cuh"
#include "score/score_mod.cuh"
#include "common/packed_sequences.cuh"
#include "sm90/alibi_mma.cuh"

constexpr int GROUP_ROWS = WGMMA_M;                    // queries of a math warpgroup
constexpr int MATH_WARPGROUPS = BLOCK_Q / GROUP_ROWS, MATH_WARPS = MATH_WARPGROUPS * 4;
constexpr int THREADS = (1 + MATH_WARPGROUPS) * WARPGROUP;
constexpr int S_COUNT = BLOCK_K / 2, O_COUNT = HEAD_DIM_V / 2, P_COUNT = BLOCK_K / 4;
constexpr int WIDEST = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;

// Work goes with its Q, and is read until the rows are out.
constexpr int WORK_SLOTS = Q_STAGES > 1 ? Q_STAGES : 2;
__device__ __forceinline__ int work_slot(PipelineState<Q_STAGES> q) {
    return Q_STAGES > 1 ? q.index : static_cast<int>(q.phase);
}

// Key tiles are visited anywhere, not one after another: which, the loading warp says with each.
constexpr bool SPARSE_TILES = PAIRWISE;
constexpr bool DYNAMIC_SCHEDULER = PACKED || SEGMENTS;      // query tiles are taken from a counter
constexpr bool OPTIONS = WINDOW || SPARSE_TILES || !LINEAR || DROPOUT;
constexpr bool MASKED = CAUSAL || WINDOW || SPARSE_TILES || PACKED;  // rows may not see a key
constexpr int LAST_BIT = 1, HIDDEN_BIT = 2, ONE_ID_BIT = 4, TILE_SHIFT = 3;     // of what it says

static_assert(!(PACKED && (BIAS || PAIRWISE)), "those are asked for by tokens of the whole array");
static_assert(BLOCK_Q == 128 || BLOCK_Q == 192, "two or three math warpgroups");
static_assert(BLOCK_K % 16 == 0 && HEAD_DIM % 16 == 0, "products sum over 16 elements");

// Queries of a head from the first one on, num_rows of them. None are left if that is 0. Of packed
// sequences they are one's, from whose first token `first` counts.
struct Queries : OwnSequence { int first, num_rows, head, batch; };

// A tile of queries, and where the key tiles that it walks end. They begin with that of the first
// key that its first query sees, and are at least one, which the mask may hide wholly.
struct Work { Queries queries; int num_visited; };

// DYNAMIC_SCHEDULER: the Q producer publishes each tile (full); the K/V producer asks for the next
// when it comes to a tile's last keys (asked): what is taken while its block is still busy with a
// long tile waits for that, and other blocks may be idle. An arrival each.
// With segment ids that is when its last key tile is looked up. TAKEN_BEFORE: key tiles of a packed
// sequence still to be loaded then. With those in shared memory they last a step or two longer than
// an atomic addition, a search among offsets and a load of Q, one after another.
constexpr int TAKEN_BEFORE = 2;
template <bool> struct WorkBarriers {
    __device__ __forceinline__ void init() {}
    __device__ __forceinline__ void tell(int) {}
    __device__ __forceinline__ void await(int, u32) {}
    __device__ __forceinline__ void ask() {}
    __device__ __forceinline__ void await_asking(u32) {}
};
template <> struct WorkBarriers<true> {
    u64 full[WORK_SLOTS], asked;
    __device__ __forceinline__ void init() {
        for (u64& barrier : full) mbarrier_init(shared_address(&barrier), 1);
        mbarrier_init(shared_address(&asked), 1);
    }
    __device__ __forceinline__ void ask() { mbarrier_arrive(shared_address(&asked)); }
    __device__ __forceinline__ void await_asking(u32 phase) {
        mbarrier_wait(shared_address(&asked), phase);
    }
    __device__ __forceinline__ void tell(int place) {
        mbarrier_arrive(shared_address(&full[place]));
    }
    __device__ __forceinline__ void await(int place, u32 phase) {
        mbarrier_wait(shared_address(&full[place]), phase);
    }
};
struct Works : WorkBarriers<DYNAMIC_SCHEDULER> {
    Work at[WORK_SLOTS];
    __device__ __forceinline__ Work& operator[](int place) { return at[place]; }
};

// Ids of keys are told with k_full where the loading warp's word says that pairs are hidden. They
// are read after K's place is given back, so have twice as many places, K's of an odd round behind
// those of an even one. Who waits for K of tile n to be given back then knows that of tile
// n + KV_STAGES ids may be written where those of n - KV_STAGES stand: who gave n back has done
// with n - 1.
template <bool> struct IdsOfKeys {
    __device__ __forceinline__ int* ids(PipelineState<KV_STAGES>) { return nullptr; }
};
template <> struct IdsOfKeys<true> {
    alignas(8) int at[2 * KV_STAGES][BLOCK_K];
    __device__ __forceinline__ int* ids(PipelineState<KV_STAGES> k) {
        return at[static_cast<int>(k.phase) * KV_STAGES + k.index];
    }
};

// 16-bit biases of a warp's 16 rows and a key tile, where memory has them in chunks of 8 keys. They
// come while S is computed, or, where it is known which tile is next, as soon as those of the tile
// before have been read: under its softmax, too. A row's place is 16 bytes longer than the row, so
// that the 8 rows that ldmatrix reads at once are in different banks.
constexpr bool STAGED = BIAS && sizeof(Bias) == 2;
constexpr bool BIASES_AHEAD = STAGED && !SPARSE_TILES;
constexpr int BIAS_CHUNKS = (BLOCK_K + 31) / 32 * 4, BIAS_PITCH = BIAS_CHUNKS + 1;
template <bool> struct BiasesOfWarps {};
template <> struct BiasesOfWarps<true> { BiasChunk biases[MATH_WARPS][16][BIAS_PITCH]; };

// What goes with key tiles besides. words: the loading warp's about the tile in each place of K;
// with k_full, and read before the place is given back.
struct Beside : BiasesOfWarps<STAGED>, IdsOfKeys<SEGMENTS> {
    int words[SPARSE_TILES ? KV_STAGES : 1];
};

// Larger heads leave no room.
constexpr bool SLOPES_IN_PRODUCT = ALIBI && !SOFTCAP && !BIAS && WIDEST <= 192;

struct SharedPlan : SlopeTile<SLOPES_IN_PRODUCT> {
    SmemTile<BLOCK_Q, WIDEST> q_then_out[Q_STAGES];
    SmemTile<BLOCK_K, HEAD_DIM> k[KV_STAGES];
    SmemTile<BLOCK_K, HEAD_DIM_V> v[KV_STAGES];
    u64 q_full[Q_STAGES], q_empty[Q_STAGES];
    u64 k_full[KV_STAGES], k_empty[KV_STAGES], v_full[KV_STAGES], v_empty[KV_STAGES];
    Works work;
    Beside beside;
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

constexpr int NAN_BITS = 0x7FC00000;
constexpr float LN_2 = 0.6931471805599453f;

// Barrier 0 is __syncthreads. FIRST_TURN + w: warpgroup w may issue its products. FIRST_ROWS_OUT +
// w: its products have read Q, whose place its rows may take. (Else a turn has seen to that.)
constexpr int FIRST_TURN = 1, TURN_THREADS = 2 * WARPGROUP;
constexpr int FIRST_ROWS_OUT = FIRST_TURN + MATH_WARPGROUPS;
