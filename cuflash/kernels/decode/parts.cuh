// Which keys of which rows each block of a decode kernel computes.
//
// The rows of a key head are the pairs (query, query head of its group), in tiles of BLOCK_Q; its
// keys are in tiles of BLOCK_K. A row tile's key tiles are those that some query of the sequence
// sees, at least one.
//
// The key tiles of each row tile, whatever its queries see, are cut at multiples of
// ceil(tiles / num_splits), and each block has one part: a sequence has the same bits whatever
// stands beside it.
//
// BALANCED, for sequences of different lengths: all key tiles of all row tiles, in order, are cut
// into runs of equal cost, one for each block. So one long sequence among short ones keeps all
// blocks busy, and all end at about the same time; but where a row tile's keys are cut depends on
// the whole call. A run covers the end of one row tile, some whole ones, and the beginning of one:
// at most two parts of it are merged with other blocks' parts (finish/merge_parts.cu).
#pragma once
#include "common/mask.cuh"
#include "common/ptx.cuh"
#include "common/softmax.cuh"
#include "decode/sequences.cuh"

// A part of a row tile's keys.
struct Part {
    Sequence sequence;
    int kv_head, row_tile;
    int first_tile, end_tile;                               // key tiles
    int index, count;                                       // among the row tile's parts
    i64 first_slot;                                         // of the row tile's parts

    // The place in split_out and split_lse of one of the row tile's parts. In a balanced call a
    // block has two slots: the second is for the row tile that begins in its run.
    __device__ __forceinline__ i64 slot(int part) const {
        return BALANCED ? first_slot + 2 * part + (part == 0) : first_slot + part;
    }
};

__device__ __forceinline__ Mask<CAUSAL, WINDOW> mask_of(
    const Arguments& args, const Sequence& sequence) {
    return {sequence.seqlen_q, sequence.seqlen_k, window_of<WINDOW>(args)};
}

struct TileRange { int first, end; };

__device__ __forceinline__ int num_tiles(int length, int block) {
    return (length + block - 1) / block;
}

// The key tiles that some query of a sequence sees.
__device__ __forceinline__ TileRange seen_tiles(const Arguments& args, const Sequence& sequence) {
    const Mask<CAUSAL, WINDOW> mask = mask_of(args, sequence);
    const int first = mask.first_key(0) / BLOCK_K;
    return {first, max(num_tiles(mask.num_keys(sequence.seqlen_q - 1), BLOCK_K), first + 1)};
}

__device__ __forceinline__ int group_size_of(const Shape& shape) {
    return shape.num_heads_q / shape.num_heads_kv;
}

__device__ __forceinline__ int num_row_tiles(const Shape& shape, const Sequence& sequence) {
    return num_tiles(sequence.seqlen_q * group_size_of(shape), BLOCK_Q);
}

// What a part costs besides its tiles, in tiles: its first keys come, its state leaves.
constexpr int PART_COST = 2;

// The row tiles of a sequence, of all key heads, one after the other, and their key tiles.
struct RowTiles {
    Sequence sequence;
    TileRange seen;
    int count;

    RowTiles() = default;
    __device__ __forceinline__ RowTiles(const Arguments& args, int number)
        : sequence(sequence_of(args, number)), seen(seen_tiles(args, sequence)),
          count(num_row_tiles(args.arrays.shape, sequence) * args.arrays.shape.num_heads_kv) {}
    __device__ __forceinline__ int cost() const { return PART_COST + seen.end - seen.first; }
    __device__ __forceinline__ i64 work() const { return i64(count) * cost(); }
};

// The parts of a block's run, one after the other. Every warp walks along by itself.
class BalancedParts {
    const Arguments& args;
    const int block;
    i64 of_block, longer_blocks;                            // a run's cost; how many cost 1 more
    i64 at, end;                                            // the rest of the run
    RowTiles rows;                                          // of the sequence at `at`
    i64 row_tile_start;                                     // of the row tile at `at`
    int row_tile;                                           // among those of `rows`

    __device__ __forceinline__ i64 start_of(int block) const {
        return block * of_block + min(i64(block), longer_blocks);
    }
    // The block whose run has a place.
    __device__ __forceinline__ int block_of(i64 place) const {
        const i64 in_longer = longer_blocks * (of_block + 1);
        return static_cast<int>(
            place < in_longer ? u64(place) / u64(of_block + 1)
                              : longer_blocks + u64(place - in_longer) / u64(of_block));
    }

    // The sum over lanes up to this one.
    static __device__ __forceinline__ i64 sum_up_to_lane(i64 x) {
        const int lane = threadIdx.x % 32;
        #pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const i64 before = __shfl_sync(WHOLE_WARP, x, max(lane - distance, 0));
            x += lane >= distance ? before : 0;
        }
        return x;
    }
    // The work of the sequence 32 first + lane.
    __device__ __forceinline__ i64 work_of(int first) const {
        const int number = first + threadIdx.x % 32;
        return number < args.arrays.shape.batch ? RowTiles(args, number).work() : 0;
    }
    __device__ __forceinline__ i64 total_work() const {
        i64 work = 0;
        for (int first = 0; first < args.arrays.shape.batch; first += 32) work += work_of(first);
        return __shfl_sync(WHOLE_WARP, sum_up_to_lane(work), 31);
    }
    // Finds the sequence at `at`, and returns where it starts.
    __device__ __forceinline__ i64 find_sequence(int& number) const {
        i64 start = 0;
        for (int first = 0;; first += 32) {
            const i64 work = work_of(first), sum = sum_up_to_lane(work);
            const u32 beyond = __ballot_sync(WHOLE_WARP, at < start + sum);
            if (beyond != 0) {
                const int lane = __ffs(beyond) - 1;
                number = first + lane;
                return start + __shfl_sync(WHOLE_WARP, sum - work, lane);
            }
            start += __shfl_sync(WHOLE_WARP, sum, 31);
        }
    }

    __device__ __forceinline__ BalancedParts(const Arguments& args, int block)
        : args(args), block(block) {
        const i64 total = total_work();
        of_block = u64(total) / args.num_splits;
        longer_blocks = total - of_block * args.num_splits;
        at = start_of(block);
        end = start_of(block + 1);
    }

    // Begins with the row tile at a place of the run.
    __device__ __forceinline__ void begin(i64 place) {
        at = place;
        int number;
        const i64 start = find_sequence(number);
        rows = RowTiles(args, number);
        row_tile = static_cast<int>(u64(at - start) / u32(rows.cost()));
        row_tile_start = start + i64(row_tile) * rows.cost();
    }

public:
    explicit __device__ __forceinline__ BalancedParts(const Arguments& args)
        : BalancedParts(args, blockIdx.x) {
        if (at < end) begin(at);
    }

    // The row tile that begins in a block's run and goes on in the next one's, if there is one.
    static __device__ __forceinline__ bool find_cut_row_tile(
        const Arguments& args, int block, Part& part) {
        BalancedParts parts(args, block);
        if (parts.at >= parts.end) return false;
        parts.begin(parts.end - 1);
        return parts.next(part) && part.index == 0 && part.count > 1;
    }

    __device__ __forceinline__ bool next(Part& part) {
        while (at < end) {
            while (row_tile >= rows.count) {                // sequences without queries have none
                rows = RowTiles(args, rows.sequence.number + 1);
                row_tile = 0;
            }
            const i64 first_place = row_tile_start + PART_COST;     // of its key tiles
            const i64 row_tile_end = row_tile_start + rows.cost();
            const i64 from = max(at, first_place), to = min(row_tile_end, end);
            if (from < to) set_part(part, first_place, row_tile_end, from, to);
            at = row_tile_start = row_tile_end;
            ++row_tile;
            if (from < to) return true;
        }
        return false;
    }

private:
    // The places [from, to) of the row tile's key tiles, which are [first_place, row_tile_end).
    __device__ __forceinline__ void set_part(
        Part& part, i64 first_place, i64 row_tile_end, i64 from, i64 to) const {
        const int first = first_place >= start_of(block) ? block : block_of(first_place);
        const int last = row_tile_end <= end ? block : block_of(row_tile_end - 1);
        const int of_head = num_row_tiles(args.arrays.shape, rows.sequence);
        part.sequence = rows.sequence;
        part.kv_head = row_tile / of_head;
        part.row_tile = row_tile % of_head;
        part.first_tile = rows.seen.first + static_cast<int>(from - first_place);
        part.end_tile = rows.seen.first + static_cast<int>(to - first_place);
        part.index = block - first;
        part.count = last - first + 1;
        part.first_slot = 2 * i64(first);
    }
};

// The block's only part: blockIdx.x = row tile * num_splits + index, the row tiles counted as
// (sequence * num_heads_kv + kv_head) * row_tiles + row_tile, with those of the longest sequence.
class FixedParts {
    const Arguments& args;
    bool is_through = false;

    // Whether there is such a part.
    static __device__ __forceinline__ bool set_part(
        const Arguments& args, int counted_row_tile, int index, Part& part) {
        const Shape& shape = args.arrays.shape;
        const int row_tiles = num_tiles(shape.seqlen_q * group_size_of(shape), BLOCK_Q);
        const int head = counted_row_tile / row_tiles;
        part.row_tile = counted_row_tile % row_tiles;
        part.kv_head = head % shape.num_heads_kv;
        part.sequence = sequence_of(args, head / shape.num_heads_kv);
        const int tiles = max(num_tiles(part.sequence.seqlen_k, BLOCK_K), 1);
        const int of_part = num_tiles(tiles, args.num_splits);
        part.index = index;
        part.count = num_tiles(tiles, of_part);
        part.first_slot = i64(counted_row_tile) * args.num_splits;
        part.first_tile = index * of_part;
        part.end_tile = min(part.first_tile + of_part, tiles);
        return index < part.count && part.row_tile < num_row_tiles(shape, part.sequence);
    }

public:
    explicit __device__ __forceinline__ FixedParts(const Arguments& args) : args(args) {}

    __device__ __forceinline__ bool next(Part& part) {
        if (is_through) return false;
        is_through = true;
        const int row_tile = blockIdx.x / args.num_splits;
        return set_part(args, row_tile, blockIdx.x % args.num_splits, part);
    }

    // A row tile, if it is cut.
    static __device__ __forceinline__ bool find_cut_row_tile(
        const Arguments& args, int counted_row_tile, Part& part) {
        return set_part(args, counted_row_tile, 0, part) && part.count > 1;
    }
};

template <bool> struct PartsOf { using type = FixedParts; };
template <> struct PartsOf<true> { using type = BalancedParts; };
using Parts = PartsOf<BALANCED>::type;
