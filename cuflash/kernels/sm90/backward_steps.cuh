// The steps of the backward kernels on Hopper, sm90/backward.cu and sm90/backward_wide.cu: which
// tiles a block takes, who loads them, and P and dS of a tile.
//
// A block takes one tile of BLOCK_K keys of one key head after another: that of its own number,
// then whichever is next when it is done (a counter in global memory); if DETERMINISTIC, all from
// the counter. With SEGMENTS it is the tile of that number in the order of
// prepare/segment_order.cu. The thread that loads Q and dO tells the others which, and of which
// packed sequence, a tile ahead, in `work`. A step is a tile of BLOCK_Q queries that sees the keys,
// of each query head of the group in turn.
//
// Constants: Element, CAUSAL, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K, STAGES (places for Q and dO),
// TURNS; Arguments and the options (docs/masks.md), SEGMENTS and PACKED without TURNS.
// A kernel's SharedPlan has the tiles k, v, q[STAGES], dout[STAGES]; rows[STAGES]; parted[PARTED],
// whether segments hide pairs of a step; work[WORKS]; the barriers *_full, from those that load or
// say what to do, and *_empty, back. K has K_PLACES, one of which a tile has at k_place(count). If
// that is one, kv_empty is that of K and V; if two, of V alone, and await_place(count) is for K's.
#pragma once
#include "score/dbias.cuh"
#include "sm90/counters.cuh"
#include "score/dropout.cuh"
#include "score/pair_mask.cuh"
#include "sm90/query_rows.cuh"
#include "common/softmax.cuh"
#include "score/score_mod.cuh"
#include "common/packed_sequences.cuh"
#include "sm90/wgmma.cuh"

constexpr int S_COUNT = BLOCK_Q / 2;                        // floats of a thread: 64 keys' S^T
constexpr bool OPTIONS = WINDOW || PAIRWISE || !LINEAR || DROPOUT;
constexpr bool BY_WARP = SEGMENTS || PACKED;                // Q is loaded, tiles are found
constexpr int LOADING_THREADS = BY_WARP ? 32 : 1;
constexpr int PARTED = SEGMENTS ? STAGES : 1;
constexpr bool MASKED = CAUSAL || WINDOW || PAIRWISE || PACKED;      // rows need not see all
constexpr bool DETERMINISTIC = TURNS > 0, LAST_KEYS_FIRST = DETERMINISTIC && CAUSAL;
// P stays in float until dS is computed. Where there is no room, dS comes from the rounded P.
constexpr bool KEEPS_P = BLOCK_Q <= 64;
// Options that hide pairs say it in bits, found while S is computed. A mask without them is asked
// when P is there: it seldom cuts a tile.
constexpr bool SEEN_AS_BITS = WINDOW || PAIRWISE;
// Where P is 0, so is dS, or it is NaN, as may be what unseen tokens reach in other ways, too:
// recompute.cuh sees to that. Not to sums that dS goes into by itself.
constexpr bool MASKS_DS = !SEEN_AS_BITS || DBIAS;

static_assert(!(PACKED && (BIAS || PAIRWISE)), "those are asked for by tokens of the whole array");
static_assert(!(BY_WARP && DETERMINISTIC), "turns are those of neighbouring key tiles");
static_assert(KEEPS_P || !(SOFTCAP || DROPOUT), "what is rounded is not what dS is made of");

constexpr int WORKS = 2;                                    // in hand: one begins as one ends

// Which tile of the block's it is, counted from 0, in one register: the place of its work, and the
// parities of that and of K and V.
struct Count {
    u32 tiles = 0;
    __device__ __forceinline__ int place() const { return tiles % WORKS; }
    __device__ __forceinline__ u32 work_phase() const { return tiles / WORKS % 2; }
    __device__ __forceinline__ u32 kv_phase() const { return tiles % 2; }
};

// A key tile, and the packed sequence that it is of: so its number is counted among that one's.
struct TileOfSequence : TileCoord, Sequence {};
template <bool> struct WorkOf { using type = TileCoord; };
template <> struct WorkOf<true> { using type = TileOfSequence; };
using Work = WorkOf<PACKED>::type;

__device__ __forceinline__ NoSequence sequence_of(const TileCoord&) { return {}; }
__device__ __forceinline__ const Sequence& sequence_of(const TileOfSequence& work) { return work; }

// The query tiles of a key tile. Keys before all that a WINDOW reaches are seen by nobody, nor are
// those of a sequence without queries, but the first tile is visited: so all key tiles come to
// their ends, and neighbours stay neighbours.
template <class Sequence>
__device__ __forceinline__ QueryTiles query_tiles(
    const Arguments& args, int k_tile, const Sequence& sequence) {
    const Mask<CAUSAL, WINDOW> mask{
        seqlen_q_of(args, sequence), seqlen_k_of(args, sequence), window_of<WINDOW>(args)};
    QueryTiles tiles = mask.query_tiles(k_tile * BLOCK_K, BLOCK_Q, BLOCK_K);
    if (WINDOW || PACKED) tiles.end = max(tiles.end, tiles.first + 1);
    return tiles;
}

// The steps of a key tile: the query tiles that see it, of the group's first head, then of its
// second, and so on. With SEGMENTS by a whole warp, and at least one query tile of each head.
struct QuerySteps {
    int first, end, head, tile, left;
    __device__ __forceinline__ QuerySteps(
        const Arguments& args, QueryTiles tiles, TileCoord where)
        : first(tiles.first), end(tiles.end), tile(tiles.first) {
        const Shape& shape = arrays_of(args).shape;
        const int group_size = shape.num_heads_q / shape.num_heads_kv;
        head = where.head * group_size;
        left = group_size * (end - first);
        if constexpr (SEGMENTS) {
            const PairMask pairs(args, where.batch);
            const int met = pairs.query_tiles_between(first, end, where.tile);
            left = group_size * max(met, 1);
            if (met > 0) tile = first = pairs.query_tile_after(first - 1, where.tile, end);
        }
    }
    __device__ __forceinline__ void next(const Arguments& args, TileCoord where) {
        --left;
        if constexpr (SEGMENTS)
            tile = PairMask(args, where.batch).query_tile_after(tile, where.tile, end);
        else
            ++tile;
        if (tile < end) return;
        tile = first;
        ++head;
    }
};

// The number of a query tile among those of all heads; of packed sequences, among slots.
__device__ __forceinline__ int number_of(
    const Arguments& args, NoSequence, int batch, int head, int tile) {
    return (batch * args.arrays.shape.num_heads_q + head) * num_query_tiles(args, BLOCK_Q) + tile;
}
__device__ __forceinline__ int number_of(
    const Arguments& args, const Sequence& sequence, int batch, int head, int tile) {
    return number_of(args, NoSequence{}, batch, head, tile)
         + sequence.first_q / BLOCK_Q + sequence.number;
}

// The number that the key tile's doubts are noted by.
__device__ __forceinline__ TileCoord place_of_doubts(TileCoord where) { return where; }
__device__ __forceinline__ TileCoord place_of_doubts(const TileOfSequence& where) {
    return {where.first_slot + where.tile, where.head, where.batch};
}

// ---- The threads that load ----

// If DETERMINISTIC, a tile waits for those of smaller indices, so each of these has to be in the
// hands of a block that has started: CUDA promises no order in which blocks do, nor that all run at
// once. A block takes its tiles in order, and the smallest index under way waits for nobody.
__device__ __forceinline__ int next_index(const Arguments& args) {
    return (DETERMINISTIC ? 0 : gridDim.x) + atomicAdd(tiles_handed_out(args), 1);
}
__device__ __forceinline__ int first_index(const Arguments& args) {
    return DETERMINISTIC ? next_index(args) : blockIdx.x;
}

// Of packed sequences, moves `index` on to the first one whose tile is somebody's, `found`. By a
// whole warp. The index of a tile is all that others need.
__device__ __forceinline__ void skip_empty(const Arguments&, int&, int, TileCoord&) {}
template <class Arguments>
__device__ __forceinline__ void skip_empty(
    const Arguments& args, int& index, int num_k_tiles, TileOfSequence& found) {
    const int num_heads = args.arrays.shape.num_heads_kv;
    while (index < num_k_tiles * num_heads) {
        TileCoord tile = tile_of_block(index, num_k_tiles, num_heads, 1, args.arrays.schedule);
        const auto sequence = sequence_of_block<true>(args, tile.tile, BLOCK_K, false);
        found = {tile, sequence};
        if (sequence.has_tile) return;
        if (threadIdx.x % 32 == 0) index = next_index(args);
        index = __shfl_sync(WHOLE_WARP, index, 0);
    }
}

// Q and dO. This thread also says what to do, a key tile ahead of those who compute. BY_WARP, a
// warp finds the tiles, of which one thread loads.
template <class Shared>
__device__ __forceinline__ void load_queries(const Arguments& arguments, Shared& shared) {
    const Shape& shape = arguments.arrays.shape;
    const bool loads = !BY_WARP || threadIdx.x % 32 == 0;
    const int num_k_tiles = num_key_tiles(arguments, BLOCK_K);
    PipelineState<STAGES> ring;
    Count count;
    for (int index = first_index(arguments);; ++count.tiles) {
        Work found = {};
        skip_empty(arguments, index, num_k_tiles, found);
        const bool ended = index >= num_k_tiles * shape.num_heads_kv * shape.batch;
        Work where = {-1, 0, 0};
        if (!ended && PACKED) where = found;
        if (!ended && !PACKED) {
            TileCoord& tile = where;
            if constexpr (SEGMENTS)
                tile = tile_in_order(index, tile_order(arguments), num_k_tiles,
                                     shape.num_heads_kv, shape.batch, arguments.arrays.schedule);
            else
                tile = tile_of_block(index, num_k_tiles, shape.num_heads_kv, shape.batch,
                                     arguments.arrays.schedule);
        }
        if (LAST_KEYS_FIRST && !ended) where.tile = num_k_tiles - 1 - where.tile;
        if (loads) {
            mbarrier_wait(
                shared_address(&shared.work_empty[count.place()]), count.work_phase() ^ 1);
            shared.work[count.place()] = where;
            mbarrier_arrive(shared_address(&shared.work_full[count.place()]));
        }
        if (ended) return;
        QuerySteps step(
            arguments, query_tiles(arguments, where.tile, sequence_of(where)), where);
        for (; step.left > 0; step.next(arguments, where), ring.next()) {
            if (BY_WARP) __syncwarp();
            if (!loads) continue;
            if (step.left == 1) index = next_index(arguments);
            mbarrier_wait(shared_address(&shared.q_empty[ring.index]), ring.phase ^ 1);
            const u32 q_full = shared_address(&shared.q_full[ring.index]);
            if (SEGMENTS)
                shared.parted[ring.index] =
                    !PairMask(arguments, where.batch).sees_all(step.tile, where.tile);
            bulk_load(shared_address(&shared.rows[ring.index]),
                      static_cast<const QueryRows*>(arguments.arrays.delta)
                          + number_of(arguments, sequence_of(where), where.batch, step.head,
                                      step.tile),
                      q_full, sizeof(QueryRows));
            // Where a sequence has no query, the array's last is loaded all the same.
            const int token = sequence_of(where).first_q + step.tile * BLOCK_Q;
            const int first = PACKED ? min(token, shape.seqlen_q - 1) : token;
            tma_load_tile<BLOCK_Q, HEAD_DIM>(
                shared_address(&shared.q[ring.index]), arguments.q_map, q_full, first, step.head,
                where.batch, sizeof(QueryRows));
            mbarrier_wait(shared_address(&shared.dout_empty[ring.index]), ring.phase ^ 1);
            tma_load_tile<BLOCK_Q, HEAD_DIM_V>(
                shared_address(&shared.dout[ring.index]), arguments.dout_map,
                shared_address(&shared.dout_full[ring.index]), first, step.head, where.batch);
        }
        if (BY_WARP) index = __shfl_sync(WHOLE_WARP, index, 0);
    }
}

template <class Shared>
__device__ __forceinline__ void load_keys(const Arguments& arguments, Shared& shared) {
    for (Count count;; ++count.tiles) {
        mbarrier_wait(shared_address(&shared.work_full[count.place()]), count.work_phase());
        const Work where = shared.work[count.place()];
        if (where.tile < 0) return;
        mbarrier_arrive(shared_address(&shared.work_empty[count.place()]));
        if constexpr (Shared::K_PLACES > 1) shared.await_place(count);
        else mbarrier_wait(shared_address(&shared.kv_empty), count.kv_phase() ^ 1);
        const int first = sequence_of(where).first_k + where.tile * BLOCK_K;
        const int place = Shared::K_PLACES > 1 ? count.place() : 0;
        tma_load_tile<BLOCK_K, HEAD_DIM>(
            shared.k_place(count), arguments.k_map, shared_address(&shared.k_full[place]), first,
            where.head, where.batch);
        if (Shared::K_PLACES > 1)
            mbarrier_wait(shared_address(&shared.kv_empty), count.kv_phase() ^ 1);
        tma_load_tile<BLOCK_K, HEAD_DIM_V>(
            shared_address(&shared.v), arguments.v_map, shared_address(&shared.v_full), first,
            where.head, where.batch);
    }
}

// ---- A warp that follows ----

// At every step of the block f(number of the query tile, turn, others_before), by a whole warp. If
// DETERMINISTIC, the key tiles that add to a dQ do so in the order of their turns, which follow one
// another; others_before: this is not the first of them.
template <class Shared, class F>
__device__ __forceinline__ void follow_steps(const Arguments& arguments, Shared& shared, F f) {
    const int lane = threadIdx.x % 32;
    for (Count count;; ++count.tiles) {
        mbarrier_wait(shared_address(&shared.work_full[count.place()]), count.work_phase());
        const Work where = shared.work[count.place()];
        if (where.tile < 0) break;
        __syncwarp();
        const auto sequence = sequence_of(where);
        const int turn =
            LAST_KEYS_FIRST ? num_key_tiles(arguments, BLOCK_K) - 1 - where.tile : where.tile;
        // The first query tile that the keys before in turn are seen by; the end of those.
        const int also_before =
            LAST_KEYS_FIRST ? query_tiles(arguments, where.tile + 1, sequence).first : 0;
        constexpr bool BOUNDED = WINDOW && DETERMINISTIC && !LAST_KEYS_FIRST;
        const int end_before = BOUNDED ? query_tiles(arguments, where.tile - 1, sequence).end : 0;
        mbarrier_arrive_if(lane == 0, shared_address(&shared.work_empty[count.place()]));
        QuerySteps step(arguments, query_tiles(arguments, where.tile, sequence), where);
        for (; step.left > 0; step.next(arguments, where))
            f(number_of(arguments, sequence, where.batch, step.head, step.tile), turn,
              turn > 0 && step.tile >= also_before && (!BOUNDED || step.tile < end_before));
    }
}

// ---- P and dS, as S^T and dP^T lie in registers ----

// S^T becomes P^T = exp(scale S^T - lse), c being scale log2(e).
__device__ __forceinline__ void probabilities(
    float (&s)[S_COUNT], const QueryRows& rows, int first_column, float c) {
    const u32 lse_of_lane = shared_address(rows.lse) + first_column * 4;
    if (rows.huge) {
        const float scale = rows.scale;
        #pragma unroll
        for (int j = 0; j < S_COUNT / 4; ++j) {
            float lse[2];
            load_shared_floats(lse_of_lane + j * 32, lse[0], lse[1]);
            #pragma unroll
            for (int i = 0; i < 4; ++i) s[j * 4 + i] = weight(s[j * 4 + i], scale, lse[i % 2]);
        }
    } else {
        #pragma unroll
        for (int j = 0; j < S_COUNT / 4; ++j) {
            float lse[2];
            load_shared_floats(lse_of_lane + j * 32, lse[0], lse[1]);
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                s[j * 4 + i] = exp2_approx(fmaf(s[j * 4 + i], c, -lse[i % 2]));
        }
    }
}

// x = 0 where the query does not see the key or is none, whatever stood there, if the mask is all
// that hides pairs. first_query: of those that see the lane's two keys, 8 apart. The lane's first
// column is of query q_start.
__device__ __forceinline__ void apply_mask(
    float (&x)[S_COUNT], const Mask<CAUSAL, WINDOW>& mask, const int (&first_query)[2],
    int q_start) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int first = first_query[half] - q_start, end = mask.seqlen_q - q_start;
        #pragma unroll
        for (int j = 0; j < S_COUNT / 4; ++j)
            #pragma unroll
            for (int k = 0; k < 2; ++k)
                if (j * 8 + k < first || j * 8 + k >= end) x[j * 4 + half * 2 + k] = 0.0f;
    }
}

// ---- What options say of single pairs ----

// The lane's pairs of a step: x[4 j + 2 h + b] is of the query 8 j + b and the key 8 h after the
// first ones, and so is that bit of words of 32. What comes from memory or takes long is found
// while products run.
struct LanePairs {
    static constexpr int WORDS = (S_COUNT + 31) / 32;
    // With 128 queries there is room for the biases of 64 at a time.
    static constexpr int BIAS_PARTS = BIAS && !KEEPS_P ? 2 : 1;
    int batch, head, query, key, past;                      // the first; how far the key is before
    u32 seen[SEEN_AS_BITS ? WORDS : 1];                     // what no option hides
    u32 not_dropped[DROPOUT ? WORDS : 1];
    u32 biases[BIAS ? S_COUNT / 2 / BIAS_PARTS : 1];        // of 16 bits, in twos: load_biases()

    __device__ __forceinline__ bool hides_any() const {
        u32 args = ~0u;
        if constexpr (SEEN_AS_BITS)
            #pragma unroll
            for (u32 bits : seen) args &= bits;
        return args != ~0u;
    }
};

__device__ __forceinline__ bool has_bit(const u32* words, int i) {
    return (words[i / 32] >> i % 32 & 1) != 0;
}

// The lane's bits from those of four keys at a time: bit n of of_four(query, key) is of key + n,
// key being a multiple of 4. The four lanes that have such keys of the same queries ask about one
// each of the queries b and keys' halves h of a j, and hand one another the answers. By a whole
// warp. UNROLL: how many questions at once.
template <int UNROLL, int WORDS, class F>
__device__ __forceinline__ void ask_by_fours(
    u32 (&bits)[WORDS], const LanePairs& of, F of_four) {
    const int lane = threadIdx.x % 32, own = lane / 4 % 4;  // key % 4
    const int query = of.query + own % 2, key = of.key - own + own / 2 * 8;
    #pragma unroll
    for (int word = 0; word < WORDS; ++word) {
        u32 answers = 0;
        #pragma unroll UNROLL
        for (int j = 0; j < 8; ++j)
            answers |= of_four(query + (word * 8 + j) * 8, key) << j * 4;
        bits[word] = 0;
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 theirs = __shfl_sync(WHOLE_WARP, answers, (lane & ~12) + i * 4);
            bits[word] |= (theirs >> own & 0x11111111u) << i;
        }
    }
}

// Biases, of pairs that the array lacks those of others. The warp, whose 16 keys begin at
// key - lane / 4, reads 8 queries by 8 keys at a time, two keys a lane: neighbours in memory. Those
// of the lane's own pairs they become in take_steps().
__device__ __forceinline__ void load_biases(LanePairs& of, const Arguments& args, int part = 0) {
    if constexpr (BIAS && sizeof(Bias) == 2) {
        constexpr int COUNT = sizeof(of.biases) / sizeof(u32);
        ScoreMod<float> steps(args);
        steps.set_head(args, of.batch, of.head);
        const int lane = threadIdx.x % 32, first_key = of.key - lane / 4;
        const int first_row = of.query - lane % 4 * 2 + part * (COUNT / 2 * 8);
        const int row = first_row + lane / 4, column = first_key + lane % 4 * 2;
        if (steps.has_chunks && first_key + 16 <= steps.last_key + 1
                && first_row + COUNT / 2 * 8 <= steps.last_query + 1) {
            const u32* words = reinterpret_cast<const u32*>(steps.chunks_of_bias(row, column));
            #pragma unroll
            for (int i = 0; i < COUNT; ++i)
                of.biases[i] = words[i / 2 * (steps.bias_stride_q * 4) + i % 2 * 4];
        } else {
            const u16* biases = reinterpret_cast<const u16*>(steps.bias);
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int query = row + i / 2 * 8, key = column + i % 2 * 8;
                const u32 high = biases[steps.bias_index(query, key + 1)];
                of.biases[i] = biases[steps.bias_index(query, key)] | high << 16;
                if (i % 4 == 3) __syncwarp();               // no more at once: registers
            }
        }
    }
}

// Of one key's pairs with a word's 64 queries, as bits of LanePairs: those of the first `end`.
__device__ __forceinline__ u32 bits_before(int end) {
    const int queries = min(max(end, 0), 64), bits = queries / 8 * 4 + min(queries % 8, 2);
    return static_cast<u32>((u64{1} << bits) - 1) & 0x33333333u;
}
__device__ __forceinline__ void hide_masked(LanePairs& of, const Mask<CAUSAL, WINDOW>& mask) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int open_first = mask.open_first_query(of.key + half * 8);
        const int first = open_first - of.query, end = mask.end_after(open_first) - of.query;
        #pragma unroll
        for (int word = 0; word < LanePairs::WORDS; ++word) {
            const u32 seen = bits_before(end - word * 64) & ~bits_before(first - word * 64);
            of.seen[word] &= seen << half * 2 | 0xCCCCCCCCu >> half * 2;
        }
    }
}
__device__ __forceinline__ void hide_other_segments(
    LanePairs& of, const QueryRows& rows, const PairMask& pairs, int num_keys) {
    if constexpr (SEGMENTS) {
        const int row = of.query - rows.q_start;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int id = pairs.id_of_key(min(of.key + half * 8, num_keys - 1));
            #pragma unroll
            for (int i = 0; i < S_COUNT / 2; ++i) {
                const int bit = i / 2 * 4 + half * 2 + i % 2;
                if (rows.id(row + i / 2 * 8 + i % 2) != id) of.seen[bit / 32] &= ~(1u << bit % 32);
            }
        }
    }
}

// masked: the mask cuts the step's tile of pairs; parted: segments do.
__device__ __forceinline__ void look_at_pairs(
    LanePairs& of, const Arguments& args, const PairMask& pairs, const Dropout<float>& dropout,
    const Mask<CAUSAL, WINDOW>& mask, const QueryRows& rows, bool masked, bool parted) {
    if constexpr (SEEN_AS_BITS) {
        #pragma unroll
        for (u32& bits : of.seen) bits = ~0u;
        if (masked) hide_masked(of, mask);
        if (parted) hide_other_segments(of, rows, pairs, mask.seqlen_k);
    }
    if constexpr (HAS_MASK) {
        PairMask of_head = pairs;
        of_head.set_head(of.head);
        u32 kept[LanePairs::WORDS];
        if (of_head.has_words(of.key - threadIdx.x % 32 / 4 + 16))
            ask_by_fours<8>(kept, of, [&](int query, int key) {
                return of_head.keeps_of_four<true>(query, key);
            });
        else
            ask_by_fours<1>(kept, of, [&](int query, int key) {
                return of_head.keeps_of_four<false>(query, key);
            });
        #pragma unroll
        for (int word = 0; word < LanePairs::WORDS; ++word) of.seen[word] &= kept[word];
    }
    if constexpr (DROPOUT) {
        Dropout<float> of_head = dropout;
        of_head.set_head(of.batch, of.head);
        ask_by_fours<2>(of.not_dropped, of, [&](int query, int key) {
            return of_head.kept_of_four(query, key);
        });
    }
}

// x = 0 where a pair is hidden, whatever stood there.
__device__ __forceinline__ void hide_unseen(float (&x)[S_COUNT], const LanePairs& of) {
    if constexpr (SEEN_AS_BITS)
        #pragma unroll
        for (int i = 0; i < S_COUNT; ++i)
            if (!has_bit(of.seen, i)) x[i] = 0.0f;
}

// x Z, x being P or dP of a pair.
__device__ __forceinline__ float drop(
    float x, int i, const LanePairs& of, const Dropout<float>& dropout) {
    if constexpr (DROPOUT) return x * (has_bit(of.not_dropped, i) ? dropout.factor : 0.0f);
    else return x;
}

// The scores of products, and their derivatives: ScoreMod. With DBIAS no number goes with another:
// a NaN that is hidden may not reach the gradient of a bias. are_small: all of the warp's products.
__device__ __forceinline__ void take_steps(
    float (&scores)[S_COUNT], float (&derivatives)[S_COUNT], const float (&products)[S_COUNT],
    const Arguments& args, LanePairs& of, bool are_small) {
    constexpr int COUNT = S_COUNT / LanePairs::BIAS_PARTS;
    ScoreMod<float> steps(args);
    steps.set_head(args, of.batch, of.head);
    #pragma unroll
    for (int part = 0; part < LanePairs::BIAS_PARTS; ++part) {
        // Two keys of a query, 8 apart, next to one another.
        const auto place = [&](int i) {
            return part * COUNT + i / 4 * 4 + i / 2 % 2 + i % 2 * 2;
        };
        if constexpr (BIAS && sizeof(Bias) == 2) {
            if (part > 0) load_biases(of, args, part);
            #pragma unroll
            for (u32& pair : of.biases) pair = movmatrix_transposed(pair);
        }
        float of_pairs[COUNT], slopes[COUNT];
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) of_pairs[i] = products[place(i)];
        const auto added = [&](int i) {
            const int query = part * (COUNT / 4 * 8) + i / 4 * 8 + i / 2 % 2, key = i % 2 * 8;
            float bias = 0.0f;
            if constexpr (BIAS && sizeof(Bias) == 2)
                bias = of_pair<Bias>(of.biases[i / 4 * 2 + i % 2], i / 2 % 2);
            else
                bias = steps.bias_of(of.query + query, of.key + key);
            return steps.addend(
                static_cast<float>(of.past) + static_cast<float>(query - key), bias);
        };
        if (are_small) {
            if constexpr (SOFTCAP) steps.poly4_scores(of_pairs, added, slopes);
        } else {
            steps.scores<DBIAS ? 1 : 2>(of_pairs, added, slopes);
        }
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            scores[place(i)] = of_pairs[i];
            derivatives[place(i)] = slopes[i];
        }
    }
}

// What compute_p() does to small products if all pairs are seen. Each is done with before the next
// begins, so that no derivatives stand in registers beside all of P^T.
__device__ __forceinline__ void compute_small_p(
    float (&s)[S_COUNT], u32 (&p)[S_COUNT / 2], const QueryRows& rows, int first_column,
    const ScoreMod<float>& steps, int past) {
    const u32 lse_of_lane = shared_address(rows.lse) + first_column * 4;
    #pragma unroll
    for (int j = 0; j < S_COUNT / 4; ++j) {
        float lse[2], weights[4];
        load_shared_floats(lse_of_lane + j * 32, lse[0], lse[1]);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& x = s[j * 4 + i];
            const float score = x * steps.poly4_factor_log2(x), t = steps.poly4_tanh(score);
            const float further = j * 8 + i % 2 - i / 2 * 8;
            const float added = ALIBI
                ? fmaf(steps.addend(static_cast<float>(past) + further, 0.0f), LOG2_E, -lse[i % 2])
                : -lse[i % 2];
            weights[i] = exp2_approx(score + added);
            x = weights[i] * fmaf(-t, t, 1.0f);
        }
        p[j * 2] = pack<Element>(weights[0], weights[1]);
        p[j * 2 + 1] = pack<Element>(weights[2], weights[3]);
    }
}

// P^T Z^T from products, rounded to p. S^T becomes what dP^T Z^T - delta is multiplied by: P^T, or
// with SOFTCAP that times the derivative of the score; which DBIAS keeps apart, in `derivatives`.
// hide(x): x = 0 where nothing is to be seen; hides: something may be.
template <class Hide>
__device__ __forceinline__ void compute_p(
    float (&s)[S_COUNT], float (&derivatives)[S_COUNT], u32 (&p)[S_COUNT / 2],
    const QueryRows& rows, int first_column, float c, const Arguments& args, LanePairs& of,
    const Dropout<float>& dropout, Hide hide, bool hides) {
    bool are_small = false;
    if constexpr (SOFTCAP) {
        ScoreMod<float> steps(args);
        are_small = steps.fits_tanh_poly4(s);
        if constexpr (!(BIAS || HAS_MASK || DROPOUT))
            if (are_small && !hides && !rows.huge) {
                steps.set_head(args, of.batch, of.head);
                return compute_small_p(s, p, rows, first_column, steps, of.past);
            }
    }
    const auto pack_kept = [&](const float (&weights)[S_COUNT]) {
        float kept[S_COUNT];
        #pragma unroll
        for (int i = 0; i < S_COUNT; ++i) kept[i] = drop(weights[i], i, of, dropout);
        pack_pairs<Element>(p, kept);
    };
    if constexpr (SOFTCAP && !DBIAS) {
        float weights[S_COUNT];
        take_steps(weights, s, s, args, of, are_small);
        probabilities(weights, rows, first_column, c);
        hide(weights);
        pack_kept(weights);
        #pragma unroll
        for (int i = 0; i < S_COUNT; ++i) s[i] *= weights[i];
    } else {
        if constexpr (!LINEAR) take_steps(s, derivatives, s, args, of, are_small);
        probabilities(s, rows, first_column, c);
        hide(s);
        pack_kept(s);
    }
}

// dP^T becomes dS^T = P^T (dP^T Z^T - delta), from P as computed or, if not KEEPS_P, as rounded.
__device__ __forceinline__ void score_gradients(
    float (&dp)[S_COUNT], const float (&p)[S_COUNT], const u32 (&rounded)[S_COUNT / 2],
    const QueryRows& rows, int first_column, LanePairs& of, const Dropout<float>& dropout) {
    const u32 delta_of_lane = shared_address(rows.delta) + first_column * 4;
    // The factors Z are made of the bits anew, when dP is there, and not kept beside P.
    if constexpr (DROPOUT)
        #pragma unroll
        for (u32& bits : of.not_dropped) bits = opaque(bits);
    #pragma unroll
    for (int j = 0; j < S_COUNT / 4; ++j) {
        float delta[2];
        load_shared_floats(delta_of_lane + j * 32, delta[0], delta[1]);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 pair = rounded[j * 2 + i / 2];
            const float of_pair = i % 2 == 0 ? to_float(low_half<Element>(pair))
                                             : to_float(high_half<Element>(pair));
            const float own = KEEPS_P ? p[j * 4 + i] : of_pair;
            dp[j * 4 + i] = own * (drop(dp[j * 4 + i], j * 4 + i, of, dropout) - delta[i % 2]);
        }
    }
}

// dS^T, 0 where pairs are hidden, to the sums of dbias; then times the scores' derivatives, which
// are NaN where a score is, also of hidden pairs.
__device__ __forceinline__ void add_dbias(
    float (&ds)[S_COUNT], const float (&derivatives)[S_COUNT], const Arguments& args,
    const LanePairs& of) {
    if constexpr (DBIAS) {
        BiasGradient dbias;
        dbias.set_head(args, of.batch, of.head);
        float* of_query = dbias.sums + (of.query * dbias.stride_q + of.key * dbias.stride_k);
        #pragma unroll
        for (int i = 0; i < S_COUNT / 2; ++i) {             // queries
            #pragma unroll
            for (int half = 0; half < 2; ++half)
                reduce_add_nonzero(of_query + half * 8 * dbias.stride_k,
                                   ds[i / 2 * 4 + half * 2 + i % 2]);
            of_query = opaque(of_query + (i % 2 == 0 ? 1 : 7) * dbias.stride_q);
        }
        if constexpr (SOFTCAP)
            #pragma unroll
            for (int i = 0; i < S_COUNT; ++i)
                if (ds[i] != 0.0f) ds[i] *= derivatives[i];
    }
}
