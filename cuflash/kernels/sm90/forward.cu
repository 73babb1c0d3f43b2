// Forward attention for 16-bit types on Hopper (sm_90a): TMA loads, warpgroup products.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// FlashAttention-3 (arXiv:2407.08608). A block stays on its multiprocessor and takes one tile of
// BLOCK_Q queries of one head after another. Warpgroup 0 only loads. Each of the others has 64
// queries of the tile and walks the key tiles that they see from the last to the first, with the
// running maximum m of S, the sum l of P = exp(scale (S - m)) and the unnormalised acc = P V.
//
// Two overlaps hide the exponentials. Within a warpgroup, S of the next key tile and P V of this
// one are issued together; the softmax of the next tile runs while P V does. Between warpgroups,
// named barriers let one issue its products at a time, so that they take turns at the tensor cores.
// The "next key tile" may be the first of the next query tile: nothing drains between tiles.
//
// Grid: as many blocks as multiprocessors, or as tiles if those are fewer. Tiles are numbered by
// scheduler.cuh, longest first. Those of packed sequences, or with segment ids, are taken from a
// counter: the host does not know their lengths. With segment ids prepare/segment_order.cu finds
// those. Block: 1 + MATH_WARPGROUPS warpgroups.
//
// Constants: Element, CAUSAL, NEGATE_SCORES (scale < 0, and scores are LINEAR), HEAD_DIM and
// HEAD_DIM_V (multiples of 16 and one of those that wgmma_registers is written for), BLOCK_Q,
// BLOCK_K, Q_STAGES, KV_STAGES, SHARED_BYTES; Arguments and the options (docs/masks.md).
// Shared memory: SharedPlan, tiles as in smem.cuh.
//
// Barriers: *_full, the TMA unit to the math warpgroups: an arrival of a loading thread, and a
// tile's bytes. *_empty, back: an arrival of every math warp.
//
// Rows whose result hangs on more than this arithmetic gives (NaN, infinities, scores above 2^24)
// are found at the end of a tile and computed again, one by one: recompute_row. Slow, rare.
#include "score/dropout.cuh"
#include "common/mask.cuh"
#include "score/pair_mask.cuh"
#include "common/scheduler.cuh"
#include "common/softmax.cuh"
#include "score/score_mod.cuh"
#include "common/packed_sequences.cuh"
#include "sm90/alibi_mma.cuh"
#include "common/upper_halves.cuh"

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
struct Queries : TileSequence { int first, num_rows, head, batch; };

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

// ---- The warpgroup that loads ----

// The key tiles of num_rows queries. At least one is visited.
__device__ __forceinline__ KeyTiles key_tiles(
    const Mask<CAUSAL, WINDOW>& mask, int first_row, int num_rows) {
    const KeyTiles tiles = mask.key_tiles(first_row, num_rows, BLOCK_K);
    return {tiles.num_full, max(tiles.num_visited, 1), tiles.first, tiles.first_full};
}

// The first of them, of queries from first_row on.
__device__ __forceinline__ int first_key_tile(const Mask<CAUSAL, WINDOW>& mask, int first_row) {
    return mask.first_key(first_row) / BLOCK_K;
}

template <class Sequence>
__device__ __forceinline__ Mask<CAUSAL, WINDOW> mask_of(
    const Arguments& args, const Sequence& sequence) {
    return {seqlen_q_of(args, sequence), seqlen_k_of(args, sequence), window_of<WINDOW>(args)};
}

// A tile that is not full, but of whole warpgroups' queries, comes where queries see least: under
// the causal mask first, else last. Segments' tiles are counted from the first query.
__device__ __forceinline__ Queries queries_of_tile(
    TileCoord where, const TileSequence& sequence, const Arguments& args) {
    if (where.tile < 0) return {sequence, 0, 0, 0, 0};
    const int length = seqlen_q_of(args, sequence), groups = (length + GROUP_ROWS - 1) / GROUP_ROWS;
    const int lacking = CAUSAL && !SEGMENTS
        ? (MATH_WARPGROUPS - 1 - (groups - 1) % MATH_WARPGROUPS) * GROUP_ROWS : 0;
    const int first = where.tile * BLOCK_Q - lacking, end = min(first + BLOCK_Q, length);
    return {sequence, max(first, 0), end - max(first, 0), where.head, where.batch};
}

template <class Tiles>
__device__ __forceinline__ Work next_work(Tiles& tiles, const Arguments& arguments) {
    const Queries queries = tiles.next(arguments);
    const Mask<CAUSAL, WINDOW> mask = mask_of(arguments, queries);
    return {queries, key_tiles(mask, queries.first, queries.num_rows).num_visited};
}

// How tiles are dealt. Of a window's those that see key 0, or would see keys before it, are
// shorter. With a bias alone all count as those, and go section by section, as heads may share it.
// (Under the causal mask alone tiles differ too much for rounds: they go in pairs.)
constexpr bool IN_ROUNDS = WINDOW || (BIAS && !CAUSAL);
template <bool> struct WalkOf { using type = StaticScheduler; };
template <> struct WalkOf<true> { using type = BalancedScheduler; };
using Walk = WalkOf<IN_ROUNDS>::type;

template <class Arguments> __device__ __forceinline__ Walk walk_of(const Arguments& args) {
    const Shape& shape = args.arrays.shape;
    if constexpr (IN_ROUNDS) {
        const int growing = mask_of(args, NoSequence{}).end_query(0);
        const int shorter = WINDOW ? (growing + BLOCK_Q - 1) / BLOCK_Q : args.work_items.singles;
        return {args.work_items, args.arrays.schedule, shape.num_heads_q, shape.batch, shorter};
    } else {
        return {args.work_items, shape.num_heads_q};
    }
}

// A block's tiles, one after another. Each who asks counts them for itself.
struct StaticTiles {
    Walk walk;
    explicit __device__ __forceinline__ StaticTiles(const Arguments& args, int = 0)
        : walk(walk_of(args)) {}
    __device__ __forceinline__ Queries next(const Arguments& args) {
        return queries_of_tile(walk.next(), {}, args);
    }
    __device__ __forceinline__ Work told(const Arguments& args, SharedPlan&) {
        return next_work(*this, args);
    }
    __device__ __forceinline__ Queries again(const Arguments& args) { return next(args); }
};

// Taken from a counter by one warp, which publishes them. Slots of packed sequences
// are numbered as tiles are, but of a head those of the longest sequence come first. Tiles with
// segment ids come in the order that was found, longest first.
template <class Arguments> struct DynamicTiles {
    int last;
    bool begun = false;
    PipelineState<WORK_SLOTS> place;
    explicit __device__ __forceinline__ DynamicTiles(const Arguments&, int last = -1)
        : last(last) {}

    // By a whole warp.
    static __device__ __forceinline__ Queries of_slot(const Arguments& args, int number) {
        const int slots = num_query_tiles(args, BLOCK_Q);
        const Shape& shape = args.arrays.shape;
        if constexpr (SEGMENTS)
            return queries_of_tile(
                tile_in_order(number, tile_order(args), slots, shape.num_heads_q,
                              shape.batch, args.arrays.schedule), {}, args);
        TileCoord where = tile_of_block(
            number, slots, shape.num_heads_q, shape.batch, args.arrays.schedule);
        where.tile = slots - 1 - where.tile;
        auto sequence = sequence_of_block<false>(args, where.tile, BLOCK_Q, true);
        // Where there is no key, one of the array's is loaded all the same.
        if constexpr (PACKED) sequence.first_k = min(sequence.first_k, shape.seqlen_k - 1);
        return queries_of_tile(where, sequence, args);
    }
    static __device__ __forceinline__ int* counter(const Arguments& args) {
        if constexpr (PACKED) return &static_cast<SequenceStats*>(args.found)->handed_out;
        else return tile_counter(args);
    }
    // By the warp that takes them. When none is left, `first` is the last one's number.
    __device__ __forceinline__ Queries next(const Arguments& args) {
        for (;;) {
            const int number = begun ? take_tile(counter(args)) : blockIdx.x;
            begun = true;
            if (number >= args.work_items.items) return {{}, last, 0, 0, 0};
            const Queries queries = of_slot(args, number);
            if (queries.num_rows <= 0) continue;
            if (threadIdx.x % 32 == 0) tile_before(counter(args), number) = last;
            last = number;
            return queries;
        }
    }
    // By those who load keys.
    __device__ __forceinline__ Work told(const Arguments&, SharedPlan& shared) {
        shared.work.await(place.index, place.phase);
        const Work now = shared.work[place.index];
        place.next();
        return now;
    }
    // By each warp that wants them once more, the last one first.
    __device__ __forceinline__ Queries again(const Arguments& args) {
        if (last < 0) return {{}, 0, 0, 0, 0};
        const Queries queries = of_slot(args, last);
        last = tile_before(counter(args), last);
        return queries;
    }
};

template <bool, class Arguments> struct TileSchedulerOf { using type = StaticTiles; };
template <class Arguments> struct TileSchedulerOf<true, Arguments> {
    using type = DynamicTiles<Arguments>;
};
using Tiles = TileSchedulerOf<DYNAMIC_SCHEDULER, Arguments>::type;

// Two threads load, so that the next Q need not wait for this one's last keys. The first also says
// what to do: the work goes with its Q.
__device__ __forceinline__ void load_queries(const Arguments& arguments,
                                             SharedPlan& shared) {
    Tiles tiles(arguments);
    PipelineState<1> asking;
    for (PipelineState<Q_STAGES> ring;; ring.next(), asking.next()) {
        shared.work.await_asking(asking.phase ^ 1);
        if (DYNAMIC_SCHEDULER) __syncwarp();                // all lanes have, before it asks again
        const Work now = next_work(tiles, arguments);
        if (DYNAMIC_SCHEDULER && threadIdx.x != 0) {
            if (now.queries.num_rows == 0) return;
            continue;
        }
        const u32 full = shared_address(&shared.q_full[ring.index]);
        mbarrier_wait(shared_address(&shared.q_empty[ring.index]), ring.phase ^ 1);
        shared.work[work_slot(ring)] = now;
        shared.work.tell(work_slot(ring));
        if (now.queries.num_rows == 0) {
            mbarrier_arrive(full);
            return;
        }
        tma_load_tile<BLOCK_Q, HEAD_DIM>(
            shared_address(&shared.q_then_out[ring.index]), arguments.q_map, full,
            now.queries.first_q + now.queries.first, now.queries.head, now.queries.batch);
    }
}

__device__ __forceinline__ void load_keys(const Arguments& arguments,
                                          SharedPlan& shared) {
    const Shape& shape = arguments.arrays.shape;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    Tiles tiles(arguments);
    PipelineState<KV_STAGES> ring;
    for (;;) {
        const Work now = tiles.told(arguments, shared);
        if (now.queries.num_rows == 0) return;
        const int batch = now.queries.batch, head = now.queries.head / group_size;
        const int first = now.queries.first_k;
        const int first_tile = first_key_tile(mask_of(arguments, now.queries), now.queries.first);
        for (int tile = now.num_visited - 1; tile >= first_tile; --tile, ring.next()) {
            if (PACKED && tile == min(first_tile + TAKEN_BEFORE, now.num_visited - 1))
                shared.work.ask();
            mbarrier_wait(shared_address(&shared.k_empty[ring.index]), ring.phase ^ 1);
            tma_load_tile<BLOCK_K, HEAD_DIM>(
                shared_address(&shared.k[ring.index]), arguments.k_map,
                shared_address(&shared.k_full[ring.index]), first + tile * BLOCK_K, head, batch);
            mbarrier_wait(shared_address(&shared.v_empty[ring.index]), ring.phase ^ 1);
            tma_load_tile<BLOCK_K, HEAD_DIM_V>(
                shared_address(&shared.v[ring.index]), arguments.v_map,
                shared_address(&shared.v_full[ring.index]), first + tile * BLOCK_K, head, batch);
        }
    }
}

// A lane's share of a key tile's ids on their way: from global memory before their place is free.
struct LaneIds {
    int ids[(BLOCK_K + 31) / 32];
    __device__ __forceinline__ void load(const PairMask& pairs, int k_start, int seqlen_k) {
        if constexpr (SEGMENTS)
            #pragma unroll
            for (int i = 0; i < (BLOCK_K + 31) / 32; ++i) {
                const int key = k_start + i * 32 + threadIdx.x % 32;
                ids[i] = pairs.id_of_key(min(key, seqlen_k - 1));
            }
    }
    __device__ __forceinline__ void store(int* place) const {
        if constexpr (SEGMENTS)
            #pragma unroll
            for (int i = 0; i < (BLOCK_K + 31) / 32; ++i) {
                const int key = i * 32 + threadIdx.x % 32;
                if (key < BLOCK_K) place[key] = ids[i];
            }
    }
};

// The key tiles that a query tile visits, from the last one down: of those that the mask lets it,
// with SEGMENTS, the ones that may have an id in common with it. By a whole warp, which looks at 32
// tiles at a time, a lane at one: so all that is to be said of a tile is known before it comes.
template <class PairMask> struct ListedTiles {
    const PairMask& pairs;
    IdRange queries;                                          // their ids
    int first, from;                                        // a lane's tile is from - lane
    u32 left = 0;                                           // a bit a lane: it is still to come
    u32 hidden = 0, of_one_id = 0;                          // pairs of it are; all its ids are one

    __device__ __forceinline__ ListedTiles(
        const PairMask& pairs, int q_tile, const KeyTiles& visited)
        : pairs(pairs), first(visited.first), from(visited.num_visited + 31) {
        if constexpr (SEGMENTS) queries = pairs.ids_of_queries(q_tile);
        look_further();
    }
    // To where there are tiles left, if anywhere.
    __device__ __forceinline__ void look_further() {
        while (left == 0 && from - 32 >= first) {
            from -= 32;
            const int tile = from - threadIdx.x % 32;
            if constexpr (SEGMENTS) {
                const IdRange keys = pairs.ids_of_keys(max(tile, first));
                const bool is_one = keys.low == keys.high;
                left = __ballot_sync(WHOLE_WARP, tile >= first && !disjoint(queries, keys));
                hidden = __ballot_sync(
                    WHOLE_WARP, HAS_MASK || !is_one || queries.low != queries.high);
                of_one_id = __ballot_sync(WHOLE_WARP, is_one);
            } else {
                left = __ballot_sync(WHOLE_WARP, tile >= first);
            }
        }
    }
    __device__ __forceinline__ bool has_more() const { return left != 0; }

    // The next one. There is one.
    struct Tile { int number; bool hides, has_one_id; };
    __device__ __forceinline__ Tile take() {
        const int lane = __ffs(left) - 1;
        const Tile tile = {
            from - lane, (hidden >> lane & 1) != 0, (of_one_id >> lane & 1) != 0};
        left &= left - 1;
        look_further();
        return tile;
    }
};

// The same by a whole warp: the listed tiles, or one if there are none, all hidden.
__device__ __forceinline__ void load_listed_keys(const Arguments& arguments, SharedPlan& shared) {
    const Shape& shape = arguments.arrays.shape;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    const Mask<CAUSAL, WINDOW> mask = mask_of(arguments, TileSequence{});
    const int lane = threadIdx.x % 32;
    Tiles tiles(arguments);
    PipelineState<KV_STAGES> ring;
    for (;;) {
        const Queries queries = tiles.told(arguments, shared).queries;
        if (queries.num_rows == 0) return;
        const int head = queries.head / group_size;
        const PairMask pairs(arguments, queries.batch);
        ListedTiles<PairMask> listed(
            pairs, queries.first / BLOCK_Q,
            mask.key_tiles(queries.first, queries.num_rows, BLOCK_K));
        ListedTiles<PairMask>::Tile tile = {0, true, false};
        LaneIds ids;
        const auto look_at_next = [&] {
            if (listed.has_more()) tile = listed.take();
            if (tile.hides) ids.load(pairs, tile.number * BLOCK_K, shape.seqlen_k);
            if (DYNAMIC_SCHEDULER && !listed.has_more() && lane == 0) shared.work.ask();
        };
        look_at_next();
        for (bool last = false; !last; ring.next()) {
            last = !listed.has_more();
            const int k_start = tile.number * BLOCK_K;
            mbarrier_wait(shared_address(&shared.k_empty[ring.index]), ring.phase ^ 1);
            if (tile.hides) ids.store(shared.beside.ids(ring));
            __syncwarp();                                   // before lane 0 says that it is done
            if (lane == 0) {
                shared.beside.words[ring.index] =
                    tile.number << TILE_SHIFT | (last ? LAST_BIT : 0)
                    | (tile.hides ? HIDDEN_BIT : 0) | (tile.has_one_id ? ONE_ID_BIT : 0);
                tma_load_tile<BLOCK_K, HEAD_DIM>(
                    shared_address(&shared.k[ring.index]), arguments.k_map,
                    shared_address(&shared.k_full[ring.index]), k_start, head, queries.batch);
            }
            // What the next tile needs is read before anyone waits for V's place.
            if (!last) look_at_next();
            if (lane == 0) {
                mbarrier_wait(shared_address(&shared.v_empty[ring.index]), ring.phase ^ 1);
                tma_load_tile<BLOCK_K, HEAD_DIM_V>(
                    shared_address(&shared.v[ring.index]), arguments.v_map,
                    shared_address(&shared.v_full[ring.index]), k_start, head, queries.batch);
            }
            __syncwarp();
        }
    }
}

// ---- The warpgroups that compute ----

// Of the lane's two rows, which are 8 apart. cm: c m, rounded. l: this lane's share of the sum.
struct Rows { float m[2], cm[2], l[2]; };
__device__ __forceinline__ Rows no_rows() {
    return {{-infinity(), -infinity()}, {-infinity(), -infinity()}, {0.0f, 0.0f}};
}

// What m is multiplied to be subtracted: 2^(c S - reference).
__device__ __forceinline__ float reference(float m, float c) {
    return m == -infinity() ? 0.0f : m * c;                 // else 2^(-inf + inf)
}

// The warp's biases of a key tile begin to come to its place, if they come in chunks; whether they
// do. Other biases are read when they are added.
template <class Shared>
__device__ __forceinline__ bool load_biases(
    Shared& shared, const ScoreMod<float>& steps, int seqlen_k, int first_row, int k_start) {
    if constexpr (STAGED) {
        if (!steps.has_chunks || k_start + BIAS_CHUNKS * 8 > seqlen_k) return false;
        if constexpr (BIASES_AHEAD) __syncwarp();           // all lanes have read the last tile's
        const int lane = threadIdx.x % 32;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const BiasChunk* chunks =
                steps.chunks_of_bias(first_row + half * 8, k_start + lane % 4 * 8);
            const u32 place = shared_address(
                &shared.beside.biases[threadIdx.x / 32 - 4][lane / 4 + half * 8][lane % 4]);
            #pragma unroll
            for (int i = 0; i < BIAS_CHUNKS; i += 4)
                cp_async_16(place + i * static_cast<u32>(sizeof(BiasChunk)), chunks + i);
        }
        cp_async_commit();
        return true;
    }
    return false;
}

// The lane's of them, as S lies: of_pair(pairs[key / 16][key / 8 % 2 * 2 + half], key % 2), keys
// counted from the lane's first.
template <class Shared>
__device__ __forceinline__ void await_biases(u32 (&pairs)[BLOCK_K / 16][4], Shared& shared) {
    cp_async_wait<0>();
    __syncwarp();
    const int lane = threadIdx.x % 32;
    const u32 row = shared_address(
        &shared.beside.biases[threadIdx.x / 32 - 4][lane % 16][lane / 16]);
    #pragma unroll
    for (int i = 0; i < BLOCK_K / 16; ++i)
        ldmatrix_x4(pairs[i], row + i * 2 * static_cast<u32>(sizeof(BiasChunk)));
}

// What makes scores of the lane's products where slopes are in those: factor, and what either row
// lacks. It is added to their maxima, and not to each.
struct Origins {
    float of[2] = {0.0f, 0.0f}, factor = 1.0f;
    __device__ __forceinline__ float score(int half, float s) const {
        return SLOPES_IN_PRODUCT ? fmaf(s, factor, of[half]) : s;
    }
    // What is subtracted from c S if it were cm from the score times c.
    __device__ __forceinline__ float subtracted(int half, float cm, float c) const {
        return SLOPES_IN_PRODUCT ? fmaf(-c, of[half], cm) : cm;
    }
    __device__ __forceinline__ float exponent(float s, float c, float subtracted) const {
        return s * (SLOPES_IN_PRODUCT ? factor * c : c) - subtracted;
    }
};

// The scores of products; see ScoreMod.
template <class Shared>
__device__ __forceinline__ void apply_steps(
    float (&s)[S_COUNT], const ScoreMod<float>& steps, Shared& shared, bool biases_come, int shift,
    int first_row, int k_start) {
    const int first_key = k_start + threadIdx.x % 4 * 2;
    const float past = static_cast<float>(first_row + shift - first_key);
    const auto apply = [&](auto added) {                    // of half and key, from the first on
        if constexpr (SOFTCAP)
            if (steps.fits_tanh_poly4(s)) {
                #pragma unroll
                for (int i = 0; i < S_COUNT; ++i)
                    s[i] = steps.poly4_score(s[i]) + added(i / 2 % 2, i / 4 * 8 + i % 2);
                return;
            }
        // Four keys of a row next to one another.
        const auto place = [](int i) { return i / 8 * 8 + i / 2 % 2 * 4 + i / 4 % 2 * 2 + i % 2; };
        float scores[S_COUNT], derivatives[S_COUNT];
        #pragma unroll
        for (int i = 0; i < S_COUNT; ++i) scores[i] = s[place(i)];
        steps.scores<4>(
            scores, [&](int i) { return added(i / 4 % 2, i / 8 * 16 + i / 2 % 2 * 8 + i % 2); },
            derivatives);
        #pragma unroll
        for (int i = 0; i < S_COUNT; ++i) s[place(i)] = scores[i];
    };
    if constexpr (STAGED)
        if (biases_come) {
            u32 pairs[BLOCK_K / 16][4];
            await_biases(pairs, shared);
            return apply([&](int half, int key) {
                const u32 pair = pairs[key / 16][key / 8 % 2 * 2 + half];
                return steps.addend(past + static_cast<float>(half * 8 - key),
                                   of_pair<Bias>(pair, key % 2));
            });
        }
    apply([&](int half, int key) {
        return steps.addend(past + static_cast<float>(half * 8 - key),
                           steps.bias_of(first_row + half * 8, first_key + key));
    });
}

// S = -inf where the row's segment id is not the key's. one_id: all keys have the same.
__device__ __forceinline__ void hide_segments(
    float (&s)[S_COUNT], const int* ids_of_keys, const int (&ids)[2], bool one_id) {
    struct alignas(8) Two { int id[2]; };
    const Two* keys = reinterpret_cast<const Two*>(ids_of_keys) + threadIdx.x % 4;
    const int first = keys->id[0];
    const u32 other = __ballot_sync(WHOLE_WARP, ids[0] != first || ids[1] != first);
    if (one_id && other == 0) return;
    #pragma unroll
    for (int i = 0; i < S_COUNT / 4; ++i) {
        const Two two = keys[i * 4];
        #pragma unroll
        for (int x = 0; x < 4; ++x)
            if (two.id[x % 2] != ids[x / 2]) s[i * 4 + x] = -infinity();
    }
}

// S = -inf where the mask hides the pair.
__device__ __forceinline__ void hide_pairs(
    float (&s)[S_COUNT], const PairMask& pairs, const Shape& shape, int first_row, int k_start) {
    const int first_key = k_start + threadIdx.x % 4 * 2;
    if constexpr (HAS_MASK)
        #pragma unroll
        for (int i = 0; i < S_COUNT / 2; ++i) {
            const int key = min(first_key + i / 2 * 8 + i % 2, shape.seqlen_k - 1);
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int query = min(first_row + half * 8, shape.seqlen_q - 1);
                if (!pairs.keeps(query, key)) s[i / 2 * 4 + half * 2 + i % 2] = -infinity();
            }
        }
}

// S = -inf where the row does not see the key.
__device__ __forceinline__ void apply_mask(
    float (&s)[S_COUNT], const Mask<CAUSAL, WINDOW>& mask, int first_row, int k_start) {
    const int first_key = k_start + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int seen = max(mask.num_keys(first_row + half * 8) - first_key, 0);
        const int count = seen / 8 * 2 + min(seen % 8, 2);  // of the lane's columns
        const int before = WINDOW ? max(mask.first_key(first_row + half * 8) - first_key, 0) : 0;
        const int left_out = before / 8 * 2 + min(before % 8, 2);
        #pragma unroll
        for (int word = 0; word < (S_COUNT + 63) / 64; ++word) {
            const int bits = count - word * 32;
            u32 visible = bits >= 32 ? ~0u : (1u << max(bits, 0)) - 1;
            const int hidden = left_out - word * 32;
            if (WINDOW) visible &= hidden >= 32 ? 0u : ~0u << max(hidden, 0);
            #pragma unroll
            for (int i = word * 32; i < min(word * 32 + 32, S_COUNT / 2); ++i)
                if ((visible >> i % 32 & 1) == 0)
                    s[i / 2 * 4 + half * 2 + i % 2] = -infinity();
        }
    }
}

// P = 0 where dropout drops the pair, and the others larger.
__device__ __forceinline__ void apply_dropout(
    float (&p)[S_COUNT], const Dropout<float>& dropout, int first_row, int k_start) {
    constexpr int PAIRS = 8;                                // of keys, looked at together
    const int first_key = k_start + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        #pragma unroll
        for (int first = 0; first < S_COUNT / 4; first += PAIRS) {
            const u32 kept =
                dropout.kept_bits<PAIRS>(first_row + half * 8, first_key + first * 8);
            #pragma unroll
            for (int i = first * 2; i < min((first + PAIRS) * 2, S_COUNT / 2); ++i)
                p[i / 2 * 4 + half * 2 + i % 2] *=
                    (kept >> (i - first * 2) & 1) != 0 ? dropout.factor : 0.0f;
        }
}

// S becomes P = 2^(c S - subtracted), and what that comes to in each row: of a tile by itself, as
// roundings of one long sum are alike where weights are, and all to one side.
template <class By>
__device__ __forceinline__ void sum_weights(
    float (&s)[S_COUNT], float (&sum)[2], float c, const float (&subtracted)[2], const By& by) {
    #pragma unroll
    for (int i = 0; i < S_COUNT; ++i) {
        s[i] = exp2_approx(by.exponent(s[i], c, subtracted[i / 2 % 2]));
        sum[i / 2 % 2] += s[i];
    }
}

// m' = max(m, rowmax(S)),  P = 2^(c S - c m'),  l' = l 2^(c m - c m') + rowsum(P): S becomes P. The
// factor by which l, and acc, shrink is given back.
//
// The product c S is not rounded before c m', which is, is subtracted. That multiplies a row's P by
// 2^(c m - round(c m)), in l and acc alike; store() takes it out of lse.
//
// by: what S lacks.
template <bool MASKED>
__device__ __forceinline__ void softmax(
    float (&s)[S_COUNT], Rows& rows, float c, float (&rescale)[2], const Origins& by) {
    float subtracted[2];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        float m = s[half * 2];
        #pragma unroll
        for (int j = 0; j < S_COUNT / 4; ++j)
            m = fmaxf(fmaxf(m, s[j * 4 + half * 2]), s[j * 4 + half * 2 + 1]);
        m = fmaxf(rows.m[half], quad_max(by.score(half, m)));
        const float cm = __fmul_rn(m, c);                   // if fused, m' = m would rescale too
        subtracted[half] = MASKED && m == -infinity() ? 0.0f : cm;
        rescale[half] = exp2_approx(rows.cm[half] - subtracted[half]);
        rows.m[half] = m;
        rows.cm[half] = cm;
        subtracted[half] = by.subtracted(half, subtracted[half], c);
    }
    float sum[2] = {0.0f, 0.0f};
    sum_weights(s, sum, c, subtracted, by);
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        rows.l[half] = rows.l[half] * rescale[half] + sum[half];
}

// What makes scores of slight products, by log2(e) already: while exponentials are waited for.
struct Poly3Scores {
    const ScoreMod<float>& steps;
    __device__ __forceinline__ float subtracted(int, float cm, float) const { return cm; }
    __device__ __forceinline__ float exponent(float s, float, float subtracted) const {
        return fmaf(steps.poly3_factor_log2(s), s, -subtracted);
    }
};

// The same where m stays, so neither l nor acc shrinks: P may be above 1.
template <class By>
__device__ __forceinline__ void softmax_of_old_maxima(
    float (&s)[S_COUNT], Rows& rows, float c, const By& by) {
    float subtracted[2], sum[2] = {0.0f, 0.0f};
    #pragma unroll
    for (int half = 0; half < 2; ++half) subtracted[half] = by.subtracted(half, rows.cm[half], c);
    sum_weights(s, sum, c, subtracted, by);
    #pragma unroll
    for (int half = 0; half < 2; ++half) rows.l[half] += sum[half];
}

// Whether m may stay, for all rows of the warp: no P is above 2^15, which float16 has, and by which
// log(l) is less exact by a few 2^-24. Not if a score is NaN or infinite, or a row saw no key yet.
// Two numbers take an instruction, a maximum of each row two.
__device__ __forceinline__ bool maxima_may_stay(
    const float (&s)[S_COUNT], const Rows& rows, float c, const Origins& by) {
    constexpr float MOST = 15.0f;
    const float top = largest_at_most(s);
    bool may_stay = true;
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        may_stay &= by.exponent(top, c, by.subtracted(half, rows.cm[half], c)) <= MOST;
    return __ballot_sync(WHOLE_WARP, may_stay) == WHOLE_WARP;
}

// What a row of maximum m and sum l comes to with its head's sink: O = inverse * acc. P is `excess`
// of what it should be, in l and acc (see softmax()).
struct RowEnd { float inverse, lse; };

__device__ __forceinline__ RowEnd end_of_row(
    const Arguments& args, float m, float l, float excess, int head) {
    const float scale = LINEAR ? fabsf(static_cast<float>(args.arrays.scale)) : 1.0f;
    const bool nothing = m == -infinity();
    const WithSink<float> row(nothing ? m : m * scale, l / excess, sink_of<float>(args, head));
    if (row.sum == 0.0f) return {0.0f, -infinity()};
    return {row.rescale / (excess * row.sum), lse_of_row(row.top, row.sum)};
}

// What softmax() multiplies a row's P by: 2^(c m - round(c m)).
__device__ __forceinline__ float excess_of(float m, float c) {
    return m == -infinity() ? 1.0f : exp2_approx(fmaf(m, c, -reference(m, c)));
}

// acc becomes O = acc / l, lse = |scale| m + log(l); rows that saw no key: 0 and -inf. Says whether
// that is the result for both rows of all the warp's lanes. If not, such rows begin with a NaN.
// A sink takes part in l.
__device__ __forceinline__ bool normalise(
    const Arguments& args, float (&acc)[O_COUNT], const Rows& rows, float c, int row,
    const Queries& queries, float* lse) {
    const ForwardArguments& arguments = args.arrays;
    const int num_rows = queries.num_rows;
    const int head = PACKED && is_none(args, queries) ? NO_HEAD : queries.head;
    bool exact = true;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float m = rows.m[half], l = quad_sum(rows.l[half]);
        const float inverse = SINK ? end_of_row(args, m, l, excess_of(m, c), head).inverse
                            : l == 0.0f ? 0.0f : __fdividef(1.0f, l);
        #pragma unroll
        for (int j = 0; j < O_COUNT / 4; ++j)
            #pragma unroll
            for (int x = 0; x < 2; ++x) {
                float& o = acc[j * 4 + half * 2 + x];
                o *= inverse;
                // A NaN or an infinity of V spreads to rows that do not see it too, as 0 * NaN. And
                // weights above 1 may have been too much.
                if (MASKED || OPTIONS) exact &= fabsf(o) < infinity();
            }
        const float subtracted = reference(m, c);
        exact &= l < infinity() && fabsf(subtracted) < 0x1p24f;
        if (lse != nullptr && threadIdx.x % 4 == 0 && row + half * 8 < num_rows) {
            if constexpr (SINK) {
                lse[row + half * 8] = end_of_row(args, m, l, excess_of(m, c), head).lse;
            } else {
                const float scale = LINEAR ? fabsf(static_cast<float>(arguments.scale)) : 1.0f;
                const float rest = fmaf(m, c, -subtracted) * LN_2;
                lse[row + half * 8] = l == 0.0f ? -infinity() : m * scale + (logf(l) - rest);
            }
        }
    }
    const u32 inexact = __ballot_sync(WHOLE_WARP, !exact);
    const bool mark = (inexact >> threadIdx.x % 32 / 4 * 4 & 0xF) != 0;
    if (mark) acc[0] = acc[2] = __int_as_float(NAN_BITS);
    return inexact == 0;
}

// Where lse of the first of the queries belongs, null if it is not wanted.
__device__ __forceinline__ float* lse_of(const ForwardArguments& arguments, Queries queries) {
    const Shape& shape = arguments.shape;
    if (arguments.lse == nullptr) return nullptr;
    const i64 rows = (i64{queries.batch} * shape.num_heads_q + queries.head) * shape.seqlen_q;
    return static_cast<float*>(arguments.lse) + rows + queries.first_q + queries.first;
}

// The row of O of the first of the queries.
__device__ __forceinline__ Element* out_of(const ForwardArguments& arguments, Queries queries) {
    const Strides stride = arguments.out_stride;
    return static_cast<Element*>(arguments.out) + queries.batch * stride.batch
         + queries.head * stride.head + (queries.first_q + queries.first) * stride.token;
}

// The warp's 16 rows of O as a tile of BLOCK_Q rows, from the row on at which `rows` points.
__device__ __forceinline__ void store_to_tile(u32 rows, const float (&o)[O_COUNT]) {
    const int lane = threadIdx.x % 32;
    const u32 chunk_of_lane = rows + tile_offset<BLOCK_Q>(lane % 16, lane / 16 * 8);
    #pragma unroll
    for (int j = 0; j < O_COUNT / 8; ++j) {                 // 16 rows, 16 columns
        const u32 panel = j / 4 * (BLOCK_Q * PANEL_ROW_BYTES);
        stmatrix_x4((chunk_of_lane ^ (j % 4 * 2 * CHUNK_BYTES)) + panel,
                    pack<Element>(o[j * 8], o[j * 8 + 1]),
                    pack<Element>(o[j * 8 + 2], o[j * 8 + 3]),
                    pack<Element>(o[j * 8 + 4], o[j * 8 + 5]),
                    pack<Element>(o[j * 8 + 6], o[j * 8 + 7]));
    }
}

// ---- Rows that need more than that ----

// One row from the definition, by one warp.
__device__ __forceinline__ void recompute_row(
    const Arguments& args, int query, int head, int batch, float c, Element* out,
    float* lse) {
    const ForwardArguments& arguments = args.arrays;
    const Shape& shape = arguments.shape;
    const int lane = threadIdx.x % 32;
    const int kv_head = head / (shape.num_heads_q / shape.num_heads_kv);
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const int first = mask.first_key(query), seen = mask.num_keys(query);
    PairMask pairs(args, batch);
    pairs.set_head(head);
    ScoreMod<float> steps(args);
    steps.set_head(args, batch, head);
    Dropout<float> dropout(args);
    dropout.set_head(batch, head);
    const auto hides = [&](int key) { return PAIRWISE && !pairs.visible(query, key); };
    const Strides qs = arguments.q_stride, ks = arguments.k_stride, vs = arguments.v_stride;
    const Element* q = static_cast<const Element*>(arguments.q)
                     + batch * qs.batch + head * qs.head + query * qs.token;
    const Element* k = static_cast<const Element*>(arguments.k)
                     + batch * ks.batch + kv_head * ks.head;
    const Element* v = static_cast<const Element*>(arguments.v)
                     + batch * vs.batch + kv_head * vs.head;
    const auto score = [&](int key) {
        float s = 0.0f;
        for (int d = 0; d < shape.head_dim; ++d)
            s += to_float(q[d]) * to_float(k[key * ks.token + d]);
        if (!LINEAR)
            s = steps.score(
                s, static_cast<float>(query + (shape.seqlen_k - shape.seqlen_q) - key),
                steps.bias_of(query, key));
        return NEGATE_SCORES ? -s : s;
    };
    constexpr int COLUMNS = (HEAD_DIM_V + 31) / 32;         // of a lane
    float m = -infinity(), l = 0.0f, acc[COLUMNS] = {};
    for (int key = first + lane; key < seen; key += 32)
        if (!hides(key)) m = fmaxf(m, score(key));
    for (int i = 1; i < 32; i *= 2) m = fmaxf(m, __shfl_xor_sync(WHOLE_WARP, m, i));
    const float subtracted = finite_reference(m, c);
    for (int start = first; start < seen; start += 32) {
        const bool hidden = PAIRWISE && start + lane < seen && hides(start + lane);
        const u32 left_out = PAIRWISE ? __ballot_sync(WHOLE_WARP, hidden) : 0u;
        const float mine = start + lane < seen && !hidden
            ? exp2_of_product(score(start + lane), c, subtracted) : 0.0f;
        for (int i = 0; i < min(32, seen - start); ++i) {
            const float p = __shfl_sync(WHOLE_WARP, mine, i);
            if (PAIRWISE && (left_out >> i & 1) != 0) continue;
            const float kept = DROPOUT ? p * dropout.z(query, start + i) : p;
            l += p;
            #pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                if (lane + j * 32 < shape.head_dim_v)
                    acc[j] += kept * to_float(v[(start + i) * vs.token + lane + j * 32]);
        }
    }
    const float inverse = SINK ? end_of_row(args, m, l, 1.0f, head).inverse
                        : l == 0.0f ? 0.0f : 1.0f / l;
    #pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
        if (lane + j * 32 < shape.head_dim_v)
            out[lane + j * 32].bits = static_cast<u16>(pack<Element>(acc[j] * inverse, 0.0f));
    if (lse != nullptr && lane == 0) {
        const float scale = LINEAR ? fabsf(static_cast<float>(arguments.scale)) : 1.0f;
        *lse = SINK ? end_of_row(args, m, l, 1.0f, head).lse
             : lse_of_row(m * scale, l);
    }
}

// Computes again what begins with a NaN, in the warp's rows of all the block's tiles. That may be
// the result, too. last_tile: the number of the last one, if they are DYNAMIC_SCHEDULER.
__device__ __forceinline__ void recompute_rows(
    const Arguments& arguments, int warp_row, float c, int last_tile) {
    const ForwardArguments& arrays = arguments.arrays;
    Tiles tiles(arguments, last_tile);
    __syncwarp();                                           // the warp's stores are done
    for (;;) {
        const Queries queries = tiles.again(arguments);
        if (queries.num_rows == 0) return;
        for (int row = warp_row; row < min(warp_row + 16, queries.num_rows); ++row) {
            Element* out = out_of(arrays, queries) + row * arrays.out_stride.token;
            float* lse = lse_of(arrays, queries);
            const bool marked = !(fabsf(to_float(out[0])) <= infinity());
            __syncwarp();                                   // before recompute_row writes there
            if (marked)
                recompute_row(sequence_arguments(arguments, queries, BLOCK_Q), queries.first + row,
                          queries.head, queries.batch, c, out, lse == nullptr ? lse : lse + row);
        }
    }
}

// ---- All of it ----

// What steps do besides, as arguments of theirs: closures of plain steps are as if there were none.
struct NoStepOptions { static constexpr bool any = false; };
template <class A, class B, class C, class D, class E, class F> struct StepOptions {
    static constexpr bool any = true;
    const A& find_tile; const B& tiles_left; const C& begin_steps; const D& take_steps;
    const E& hide; const F& drop;
};
template <bool ANY, class A, class B, class C, class D, class E, class F>
__device__ __forceinline__ auto step_options(
    const A& find_tile, const B& tiles_left, const C& begin_steps, const D& take_steps,
    const E& hide, const F& drop) {
    if constexpr (ANY)
        return StepOptions<A, B, C, D, E, F>{
            find_tile, tiles_left, begin_steps, take_steps, hide, drop};
    else return NoStepOptions{};
}

__device__ __forceinline__ void compute_all(const Arguments& arguments,
                                            SharedPlan& shared) {
    auto&& shape = tile_shape(arguments);
    // Known to be a warp's, and all that follows from it: so which tiles a warp is at, and their
    // descriptors, are computed once for 32 lanes, and the products need not fetch them from there.
    const int group = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0) - 1;
    const int lane = threadIdx.x % 32, group_row = group * GROUP_ROWS;
    const int warp_row = (threadIdx.x / 32 - 4) * 16, lane_row = warp_row + lane / 4;
    const float scale = fabsf(static_cast<float>(arguments.arrays.scale));
    // Never 0: 0 * inf is NaN.
    const float c = LINEAR ? fmaxf(scale * LOG2_E, 1.2e-38f) : LOG2_E;
    Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k};
    if constexpr (WINDOW) mask.window = window_of<WINDOW>(arguments);
    ScoreMod<float> steps(arguments);
    PairMask pairs(arguments, 0);
    Dropout<float> dropout(arguments);
    bool biases_come = false;                               // of the key tile at hand

    const u64 q_rows = descriptor(
        shared_address(&shared.q_then_out) + group_row * PANEL_ROW_BYTES, 0);
    const u64 k_tile = descriptor(shared_address(&shared.k), 0);
    const u64 v_tile = descriptor(shared_address(&shared.v), BLOCK_K * PANEL_ROW_BYTES);
    const u32 q_full = shared_address(&shared.q_full), q_empty = shared_address(&shared.q_empty);
    const u32 k_full = shared_address(&shared.k_full), k_empty = shared_address(&shared.k_empty);
    const u32 v_full = shared_address(&shared.v_full), v_empty = shared_address(&shared.v_empty);

    float s[S_COUNT], acc[O_COUNT], rescale[2];
    bool started = false;                                   // acc holds something
    bool exact = true;                                      // all rows so far
    u32 p[P_COUNT];
    Rows rows = no_rows();
    PipelineState<Q_STAGES> q;
    PipelineState<KV_STAGES> k, v{KV_STAGES - 1, 1};        // v: of P, the last key tile; k: next

    const auto await_turn = [&] {
        barrier_sync(FIRST_TURN + group, TURN_THREADS);
    };
    const auto pass_turn = [&] {
        barrier_arrive(FIRST_TURN + (group + 1) % MATH_WARPGROUPS, TURN_THREADS);
    };
    SlopeRows<SLOPES_IN_PRODUCT> slopes;
    const auto issue_scores = [&](int tile) {
        gemm_abt_ss<Element, NEGATE_SCORES ? -1 : 1, BLOCK_Q, BLOCK_K, HEAD_DIM>(
            s, advance(q_rows, q.index * static_cast<int>(sizeof(shared.q_then_out[0]))),
            advance(k_tile, k.index * static_cast<int>(sizeof(shared.k[0]))));
        slopes.multiply_add(s, tile * BLOCK_K, shared.slope_keys());
        wgmma_commit();
    };
    const auto issue_output = [&] {
        gemm_ab_rs<Element, BLOCK_K>(
            acc, p, advance(v_tile, v.index * static_cast<int>(sizeof(shared.v[0]))), started);
        wgmma_commit();
        started = true;
    };
    const auto await_output = [&] {
        wgmma_wait<0>();
        warpgroup_fence_operand(acc);
        if (lane == 0) mbarrier_arrive(v_empty + 8 * v.index);
    };

    // Of the query tile at hand: the lane's first row, and the key tiles that the warpgroup visits.
    // Of those that are loaded it may have no use for the last few. To leave them out it must have
    // waited for them, but without giving back the one that P waits for: KV_STAGES - 1 at most.
    int first_row, num_skipped;
    KeyTiles visited;
    int ids[2];                                             // of the lane's rows, with SEGMENTS
    int listed = 0;                                         // of the last key tile, if SPARSE_TILES
    const auto begin_tile = [&] {
        mbarrier_wait(q_full + 8 * q.index, q.phase);
        const Work& work = shared.work[work_slot(q)];
        if (work.queries.num_rows == 0) return false;
        first_row = work.queries.first + lane_row;
        set_lengths(shape, work.queries);
        set_lengths(mask, work.queries);
        visited = key_tiles(mask, work.queries.first + group_row, GROUP_ROWS);
        // Down to the block's first, which others may see.
        if constexpr (WINDOW) visited.first = first_key_tile(mask, work.queries.first);
        if (group_row >= work.queries.num_rows) visited.num_visited = visited.first + 1;
        num_skipped = min(work.num_visited - visited.num_visited, KV_STAGES - 1);
        visited.num_visited = work.num_visited - num_skipped;
        steps.set_head(arguments, work.queries.batch, work.queries.head);
        slopes.set_head(steps.slope, steps.scale,
                        work.queries.first + group_row + shape.seqlen_k - shape.seqlen_q);
        pairs.set_head(work.queries.head);
        dropout.set_head(work.queries.batch, work.queries.head);
        dropout.set_sequence(number_of(work.queries));
        if constexpr (PAIRWISE) pairs.batch = work.queries.batch;
        if constexpr (SEGMENTS)
            #pragma unroll
            for (int half = 0; half < 2; ++half)
                ids[half] = pairs.id_of_query(min(first_row + half * 8, shape.seqlen_q - 1));
        return true;
    };
    const auto skip_tiles = [&] {
        if constexpr (!SPARSE_TILES) for (int i = 0; i < num_skipped; ++i) {
            mbarrier_wait(k_full + 8 * k.index, k.phase);
            await_turn();
            pass_turn();
            if (lane == 0) mbarrier_arrive(k_empty + 8 * k.index);
            mbarrier_wait(v_full + 8 * k.index, k.phase);
            if (lane == 0) mbarrier_arrive(v_empty + 8 * k.index);
            k.next();
        }
    };

    // Of key tile `tile`. A single place of Q is given back after its last S.
    const auto scores_done = [&](int tile) {
        warpgroup_fence_operand(s);
        if (lane == 0) mbarrier_arrive(k_empty + 8 * k.index);
        if (Q_STAGES == 1 && tile == 0 && lane == 0) mbarrier_arrive(q_empty);
    };
    const auto mask_scores = [&](int tile) {
        if (tile < visited.num_full) return;
        apply_mask(s, mask, first_row, tile * BLOCK_K);
    };
    // What steps with OPTIONS do besides. They know their key tile when it has come.
    const auto find_tile = [&](int expected) {
        if constexpr (SPARSE_TILES) {
            listed = shared.beside.words[k.index];
            return listed >> TILE_SHIFT;
        } else {
            return expected;
        }
    };
    const auto tiles_left = [&](int tile) {
        return SPARSE_TILES ? (listed & LAST_BIT) == 0 : tile - visited.first;
    };
    const auto begin_steps = [&](int tile) {
        biases_come = load_biases(shared, steps, shape.seqlen_k, first_row, tile * BLOCK_K);
    };
    // Whether products are left as they are, which are slight.
    Origins origins;
    const auto take_steps = [&](int tile, auto may_leave) {
        if constexpr (SLOPES_IN_PRODUCT) {
            origins = {};
            if (slopes.side != Side::ACROSS) {
                const int past = first_row + shape.seqlen_k - shape.seqlen_q
                               - slopes.nearest_key(tile * BLOCK_K);
                for (int half = 0; half < 2; ++half)
                    origins.of[half] = steps.addend(static_cast<float>(past + half * 8), 0.0f);
                origins.factor = steps.scale;
                return false;
            }
        }
        if constexpr (may_leave.value)
            if (steps.fits_tanh_poly3(s, fminf(rows.cm[0], rows.cm[1]))) return true;
        if constexpr (!LINEAR)
            apply_steps(
                s, steps, shared, biases_come, shape.seqlen_k - shape.seqlen_q, first_row,
                tile * BLOCK_K);
        if constexpr (BIASES_AHEAD)
            if (tile > visited.first) begin_steps(tile - 1);
        return false;
    };
    const auto hide = [&](int tile) {
        if constexpr (SEGMENTS)
            if ((listed & HIDDEN_BIT) != 0)
                hide_segments(s, shared.beside.ids(k), ids, (listed & ONE_ID_BIT) != 0);
        if constexpr (HAS_MASK) hide_pairs(s, pairs, shape, first_row, tile * BLOCK_K);
        if (visited.full(tile)) return;
        apply_mask(s, mask, first_row, tile * BLOCK_K);
    };
    const auto drop = [&](int tile) {
        if constexpr (DROPOUT) apply_dropout(s, dropout, first_row, tile * BLOCK_K);
    };
    const auto options =
        step_options<OPTIONS>(find_tile, tiles_left, begin_steps, take_steps, hide, drop);

    // The place of Q from which the warp's rows are on their way out, -1 if none: it is given back
    // a step later, when they surely have been read.
    int unread = -1;
    const auto release_place = [&] {
        if (unread >= 0 && lane == 0) {
            tma_store_wait_read<0>();
            mbarrier_arrive(q_empty + 8 * unread);
        }
        unread = -1;
    };

    // The rows of the query tile whose work is at `place`: out through the place of its Q, or from
    // the registers if there is only one, which is taken again.
    const auto finish = [&](int place) {
        const Queries queries = shared.work[place].queries;
        const ForwardArguments& arrays = arguments.arrays;
        exact &= normalise(
            arguments, acc, rows, c, lane_row, queries, lse_of(arrays, queries));
        if constexpr (Q_STAGES > 1) {
            const u32 tile = shared_address(&shared.q_then_out)
                           + place * static_cast<int>(sizeof(shared.q_then_out[0]));
            store_to_tile(tile + warp_row * PANEL_ROW_BYTES, acc);
            fence_async_proxy();
            __syncwarp();
            // Behind a packed sequence's last row comes the next one's first.
            const bool by_rows = PACKED && queries.num_rows < warp_row + 16;
            if (by_rows) {
                const i64 stride = arrays.out_stride.token;
                store_tile<16, HEAD_DIM_V, 32, BLOCK_Q>(
                    tile, warp_row,
                    reinterpret_cast<u16*>(out_of(arrays, queries) + warp_row * stride),
                    stride, queries.num_rows - warp_row, shape.head_dim_v, true, lane);
                __syncwarp();
            }
            if (lane == 0 && !by_rows && warp_row < queries.num_rows) {
                #pragma unroll
                for (int panel = 0; panel < num_panels(HEAD_DIM_V); ++panel)
                    tma_store(arguments.out_map,
                              tile + (panel * BLOCK_Q + warp_row) * PANEL_ROW_BYTES,
                              panel * PANEL_COLUMNS, queries.first_q + queries.first + warp_row,
                              queries.head, queries.batch);
                tma_store_commit();
            }
            unread = place;
        } else {
            const i64 stride = arrays.out_stride.token;
            store_to_array(out_of(arrays, queries) + lane_row * stride, stride, acc, lane_row,
                           queries.num_rows, shape.head_dim_v);
        }
        started = false;
        rows = no_rows();
    };

    // The first S of a query tile, alone; the rows of the one before go out meanwhile.
    const auto first_step = [&](auto meanwhile, auto options) {
        k = v;
        k.next();
        skip_tiles();
        int tile = visited.num_visited - 1;
        mbarrier_wait(k_full + 8 * k.index, k.phase);
        if constexpr (options.any) tile = options.find_tile(tile);
        await_turn();
        warpgroup_fence_operand(s);
        wgmma_fence();
        issue_scores(tile);
        pass_turn();
        meanwhile();
        if constexpr (options.any) options.begin_steps(tile);
        wgmma_wait<0>();
        if constexpr (options.any) {
            scores_done(options.tiles_left(tile));
            options.take_steps(tile, Bool<false>{});
            options.hide(tile);
        } else {
            scores_done(tile);
            mask_scores(tile);
        }
        softmax<true>(s, rows, c, rescale, origins);
        if constexpr (options.any) options.drop(tile);
        v = k;
        pack_pairs<Element>(p, s);
    };

    // One step: S of key tile `tile`, acc += P V of the one before. P becomes that of `tile`.
    // new_rows: the one before was the last of another query tile, whose work is at place `done`.
    const auto step = [&](int tile, auto masked, auto new_rows, int done, auto options) {
        k = v;
        k.next();
        if constexpr (new_rows.value) skip_tiles();
        mbarrier_wait(k_full + 8 * k.index, k.phase);
        if constexpr (options.any) tile = options.find_tile(tile);
        await_turn();
        warpgroup_fence_operand(acc);
        warpgroup_fence_operand(s);
        wgmma_fence();
        issue_scores(tile);
        mbarrier_wait(v_full + 8 * v.index, v.phase);
        wgmma_fence();
        issue_output();
        pass_turn();
        if constexpr (options.any && !(BIASES_AHEAD && !new_rows.value)) options.begin_steps(tile);
        wgmma_wait<1>();
        constexpr bool may_leave = SOFTCAP && !ALIBI && !BIAS && !masked.value;
        constexpr bool may_stay = may_leave
            || (options.any && !new_rows.value && !SOFTCAP && !DROPOUT);
        bool stays = false;                                 // m does
        if constexpr (options.any) {
            scores_done(options.tiles_left(tile));
            stays = options.take_steps(tile, Bool<may_leave>{});
            if constexpr (may_stay && !may_leave)           // before any pair is hidden by -inf
                stays = maxima_may_stay(s, rows, c, origins);
        } else {
            scores_done(tile);
        }
        if constexpr (new_rows.value) {
            await_output();
            finish(done);
        }
        if constexpr (masked.value && options.any) options.hide(tile);
        else if constexpr (masked.value) mask_scores(tile);
        // Warps go different ways, but those of a warpgroup wait for a product by one instruction:
        // before the ways or, where scores take longest, after them. What follows the wait is then
        // a third way, which all go.
        constexpr bool waits_before = may_stay && !(SOFTCAP || ALIBI);
        constexpr bool waits_after = may_stay && !waits_before;
        if constexpr (waits_before && !new_rows.value) await_output();
        // All that follows is written out for each way, so that what can be done while exponentials
        // are waited for is in one stream of instructions with them. (A function of it, called for
        // both, changes plain kernels.)
        #pragma unroll
        for (int way = 0; way < (waits_after ? 3 : may_stay ? 2 : 1); ++way) {
            const bool rescales = !stays;
            if (way < 2) {
                if (stays != (way == 1)) continue;
                if (rescales) softmax<masked.value || BIAS>(s, rows, c, rescale, origins);
                else if constexpr (may_leave)
                    softmax_of_old_maxima(s, rows, c, Poly3Scores{steps});
                else softmax_of_old_maxima(s, rows, c, origins);
                if constexpr (options.any) options.drop(tile);
                if (waits_after) continue;
            }
            if constexpr (!new_rows.value) {
                if constexpr (!waits_before) await_output();
                if (rescales)
                    #pragma unroll
                    for (int i = 0; i < O_COUNT; ++i) acc[i] *= rescale[i / 2 % 2];
                release_place();
            }
            v = k;
            pack_pairs<Element>(p, s);
        }
    };

    // The last P V, alone.
    const auto last_step = [&] {
        mbarrier_wait(v_full + 8 * v.index, v.phase);
        warpgroup_fence_operand(acc);
        wgmma_fence();
        issue_output();
        await_output();
    };

    // There are no more blocks than tiles; but of packed sequences others may have taken all.
    if constexpr (PACKED)
        if (!begin_tile()) return;
    if (group == MATH_WARPGROUPS - 1) pass_turn();
    if constexpr (!PACKED) begin_tile();
    first_step([] {}, options);
    for (;;) {
        if constexpr (SPARSE_TILES) {
            while ((listed & LAST_BIT) == 0) step(0, Bool<true>{}, Bool<false>{}, -1, options);
        } else {
            int tile = visited.num_visited - 2;
            for (; tile >= visited.num_full; --tile)
                step(tile, Bool<true>{}, Bool<false>{}, -1, options);
            for (; tile >= (WINDOW ? visited.first_full : 0); --tile)
                step(tile, Bool<false>{}, Bool<false>{}, -1, options);
            if constexpr (WINDOW)                           // whose other end cuts, too
                for (; tile >= visited.first; --tile)
                    step(tile, Bool<true>{}, Bool<false>{}, -1, options);
        }
        release_place();
        const int done = work_slot(q);
        if constexpr (Q_STAGES == 1) last_step();
        q.next();
        const bool more = begin_tile();
        if (!more) {
            if constexpr (Q_STAGES > 1) {
                last_step();
                barrier_sync(FIRST_ROWS_OUT + group, WARPGROUP);
            }
            finish(done);
            break;
        }
        if constexpr (Q_STAGES == 1)
            first_step([&] { finish(done); }, options);
        else
            step(visited.num_visited - 1, Bool<true>{}, Bool<true>{}, done, options);
    }
    if (group == 0) await_turn();                           // takes back the first turn
    if (Q_STAGES > 1 && lane == 0) tma_store_wait<0>();
    if (!exact) recompute_rows(arguments, warp_row, c, shared.work[work_slot(q)].queries.first);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward_wgmma(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Q_STAGES; ++i) {
            mbarrier_init(shared_address(&shared.q_full[i]), 1);
            mbarrier_init(shared_address(&shared.q_empty[i]), MATH_WARPS);
        }
        for (int i = 0; i < KV_STAGES; ++i) {
            mbarrier_init(shared_address(&shared.k_full[i]), 1);
            mbarrier_init(shared_address(&shared.k_empty[i]), MATH_WARPS);
            mbarrier_init(shared_address(&shared.v_full[i]), 1);
            mbarrier_init(shared_address(&shared.v_empty[i]), MATH_WARPS);
        }
        shared.work.init();
        fence_mbarrier_init();
    }
    shared.fill_slopes<THREADS>();
    __syncthreads();

    // 64 K registers: the math warpgroups get what the loading one does not need. SPARSE_TILES take
    // some; but of 160 no math warpgroup can spare any.
    constexpr int MORE = SPARSE_TILES && MATH_WARPGROUPS == 2 ? 8 : 0;
    constexpr int MATH_REGISTERS = (MATH_WARPGROUPS == 2 ? 240 : 160) - MORE;
    constexpr int LOAD_REGISTERS = (MATH_WARPGROUPS == 2 ? 24 : 32) + MORE * MATH_WARPGROUPS;
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<LOAD_REGISTERS>();
        if (threadIdx.x < (DYNAMIC_SCHEDULER ? 32 : 1)) load_queries(arguments, shared);
        if constexpr (SPARSE_TILES) {
            if (threadIdx.x / 32 == 1) load_listed_keys(arguments, shared);
        } else {
            if (threadIdx.x == 32) load_keys(arguments, shared);
        }
    } else {
        warpgroup_reg_alloc<MATH_REGISTERS>();
        compute_all(arguments, shared);
    }
}
