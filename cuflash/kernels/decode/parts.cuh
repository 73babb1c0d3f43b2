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
// at most two parts of it are merged with other blocks' parts (finish/merge_parts.cu). If all row
// tiles have about as many key tiles, and there are enough blocks, all get the same number of
// slots, a multiple or divisor of a block's share: a block then has one part, or whole row tiles.
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

// Fixed cost of a part, in tiles: pipeline fill and state store.
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
    __device__ __forceinline__ int tiles() const { return seen.end - seen.first; }
    __device__ __forceinline__ int cost() const { return PART_COST + tiles(); }
};

// A place among the costs of all row tiles. Unless WIDE_PLACES, 16 times their sum is an int: with
// 64 bits, each of the divisions before a block's first load is a hundred instructions.
template <bool> struct PlaceOf { using type = int; using Unsigned = u32; };
template <> struct PlaceOf<true> { using type = i64; using Unsigned = u64; };
using Place = PlaceOf<WIDE_PLACES>::type;

__device__ __forceinline__ Place quotient(Place x, Place y) {   // of numbers from 0 on
    using Unsigned = PlaceOf<WIDE_PLACES>::Unsigned;
    return static_cast<Unsigned>(x) / static_cast<Unsigned>(y);
}

// What all row tiles cost together, and the one that costs most.
struct Costs {
    Place total;
    int highest;
};

// The parts of a block's run, one after the other. Each warp iterates independently.
class BalancedParts {
    const Arguments& args;
    int block;
    Place run, longer_runs;                                 // a run's places; how many have 1 more
    Place places_of_each = 0;                               // of a row tile; 0: as many as it costs
    Place at, end;                                          // the rest of the run
    RowTiles rows;                                          // of the sequence at `at`
    Place row_tile_start;                                   // of the row tile at `at`
    int row_tile;                                           // among those of `rows`

    __device__ __forceinline__ Place start_of(int block) const {
        return block * run + min(Place(block), longer_runs);
    }
    // The block whose run has a place.
    __device__ __forceinline__ int block_of(Place place) const {
        const Place in_longer = longer_runs * (run + 1);
        return static_cast<int>(place < in_longer
            ? quotient(place, run + 1) : longer_runs + quotient(place - in_longer, run));
    }
    __device__ __forceinline__ Place places_of(const RowTiles& rows) const {
        return places_of_each > 0 ? places_of_each : rows.cost();
    }
    // All those of the sequence first + lane.
    __device__ __forceinline__ Place places_of_lane(int first) const {
        const int number = first + threadIdx.x % 32;
        if (number >= args.arrays.shape.batch) return 0;
        const RowTiles rows(args, number);
        return rows.count * places_of(rows);
    }

    // The sum over lanes up to this one.
    static __device__ __forceinline__ Place sum_up_to_lane(Place x) {
        const int lane = threadIdx.x % 32;
        #pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const Place before = __shfl_sync(WHOLE_WARP, x, max(lane - distance, 0));
            x += lane >= distance ? before : 0;
        }
        return x;
    }
    static __device__ __forceinline__ Costs costs_of_all(const Arguments& args) {
        Costs costs{0, 0};
        for (int number = threadIdx.x % 32; number < args.arrays.shape.batch; number += 32) {
            const RowTiles rows(args, number);
            costs.total += Place(rows.count) * rows.cost();
            if (rows.count > 0) costs.highest = max(costs.highest, rows.cost());
        }
        #pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            const int other = __shfl_xor_sync(WHOLE_WARP, costs.highest, distance);
            costs.total += __shfl_xor_sync(WHOLE_WARP, costs.total, distance);
            costs.highest = max(costs.highest, other);
        }
        return costs;
    }
    // Finds the sequence at a place, and returns where it starts.
    __device__ __forceinline__ Place find_sequence(Place place, int& number) const {
        Place start = 0;
        for (int first = 0;; first += 32) {
            const Place places = places_of_lane(first), sum = sum_up_to_lane(places);
            const u32 beyond = __ballot_sync(WHOLE_WARP, place < start + sum);
            if (beyond != 0) {
                const int lane = __ffs(beyond) - 1;
                number = first + lane;
                return start + __shfl_sync(WHOLE_WARP, sum - places, lane);
            }
            start += __shfl_sync(WHOLE_WARP, sum, 31);
        }
    }

    // Begins with the row tile of a number, all sequences' counted one after the other. Returns
    // false if there are fewer.
    __device__ __forceinline__ bool begin_row_tile(int number) {
        Place tiles_before = 0, places_before = 0;
        for (int first = 0; first < args.arrays.shape.batch; first += 32) {
            const int of_lane = first + threadIdx.x % 32;
            const bool exists = of_lane < args.arrays.shape.batch;
            const Place count = exists ? RowTiles(args, of_lane).count : 0;
            const Place tiles = sum_up_to_lane(count), places = places_of_lane(first);
            const Place sum = sum_up_to_lane(places);
            const u32 beyond = __ballot_sync(WHOLE_WARP, number < tiles_before + tiles);
            if (beyond != 0) {
                const int lane = __ffs(beyond) - 1;
                rows = RowTiles(args, first + lane);
                row_tile = number - static_cast<int>(
                    tiles_before + __shfl_sync(WHOLE_WARP, tiles - count, lane));
                row_tile_start = places_before + __shfl_sync(WHOLE_WARP, sum - places, lane)
                               + row_tile * places_of(rows);
                return true;
            }
            tiles_before += __shfl_sync(WHOLE_WARP, tiles, 31);
            places_before += __shfl_sync(WHOLE_WARP, sum, 31);
        }
        return false;
    }

    // Gives as many places to each of `count` row tiles, which have at most `tiles` key tiles, and
    // cuts each into as many parts. Returns false if that leaves an eighth of the blocks idle.
    __device__ __forceinline__ bool set_equal_runs(Place count, int tiles) {
        const int blocks = args.num_splits;
        const Place parts =
            count >= blocks ? 1 : min(static_cast<int>(u32(blocks) / u32(count)), tiles);
        const Place parts_of_run = quotient(count * parts + blocks - 1, blocks);
        if (parts < tiles && 8 * parts_of_run * blocks > 9 * count * parts) return false;
        const Place of_part = quotient(tiles + parts - 1, parts);
        places_of_each = parts * of_part;
        run = parts_of_run * of_part;
        longer_runs = 0;
        at = min(start_of(block), count * places_of_each);
        end = min(at + run, count * places_of_each);
        return true;
    }
    __device__ __forceinline__ void set_balanced_runs(Place total) {
        run = quotient(total, args.num_splits);
        longer_runs = total - run * args.num_splits;
        at = start_of(block);
        end = start_of(block + 1);
    }
    __device__ __forceinline__ BalancedParts(const Arguments& args, int block)
        : args(args), block(block) {
        const Costs costs = costs_of_all(args);
        const Place batch = args.arrays.shape.batch;
        const Place count = PACKED_QUERIES ? 0 : batch * RowTiles(args, 0).count;
        const bool is_equal = count > 0 && 16 * costs.total >= 15 * count * costs.highest;
        if (!is_equal || !set_equal_runs(count, costs.highest - PART_COST))
            set_balanced_runs(costs.total);
    }

    // The places of the row tile's key tiles.
    __device__ __forceinline__ Place first_place() const {
        return row_tile_start + (places_of_each > 0 ? 0 : PART_COST);
    }
    __device__ __forceinline__ Place end_place() const { return first_place() + rows.tiles(); }

    // Begins with the row tile at a place of the run.
    __device__ __forceinline__ void begin(Place place) {
        int number;
        const Place start = find_sequence(place, number);
        at = place;
        rows = RowTiles(args, number);
        row_tile = static_cast<int>(quotient(place - start, places_of(rows)));
        row_tile_start = start + row_tile * places_of(rows);
    }

public:
    explicit __device__ __forceinline__ BalancedParts(const Arguments& args)
        : BalancedParts(args, blockIdx.x) {
        if (at < end) begin(at);
    }

    // The row tile of a run, if it is cut. OF_BLOCKS: of a block's run, which begins at most one
    // row tile that goes on in the next one's; else a run is a row tile, counted over sequences.
    template <bool OF_BLOCKS>
    static __device__ __forceinline__ bool find_cut_row_tile(
        const Arguments& args, int run, Part& part) {
        if constexpr (OF_BLOCKS) {
            BalancedParts parts(args, run);
            if (parts.at >= parts.end) return false;
            parts.begin(parts.end - 1);
            return parts.next(part) && part.index == 0 && part.count > 1;
        } else {
            BalancedParts parts(args, 0);
            if (!parts.begin_row_tile(run)) return false;
            const Place first_place = parts.first_place(), end_place = parts.end_place();
            parts.block = parts.block_of(first_place);
            parts.end = parts.start_of(parts.block + 1);
            const Place to = min(end_place, parts.end);
            parts.set_part(part, first_place, end_place, first_place, to);
            return part.count > 1;
        }
    }

    __device__ __forceinline__ bool next(Part& part) {
        while (at < end) {
            while (row_tile >= rows.count) {                // sequences without queries have none
                rows = RowTiles(args, rows.sequence.number + 1);
                row_tile = 0;
            }
            const Place from = max(at, first_place()), to = min(end_place(), end);
            if (from < to) set_part(part, first_place(), end_place(), from, to);
            row_tile_start += places_of(rows);
            at = row_tile_start;
            ++row_tile;
            if (from < to) return true;
        }
        return false;
    }

private:
    // The places [from, to) of the row tile's key tiles, which are [first_place, end_place).
    __device__ __forceinline__ void set_part(
        Part& part, Place first_place, Place end_place, Place from, Place to) const {
        const int first = first_place >= start_of(block) ? block : block_of(first_place);
        const int last = end_place <= end ? block : block_of(end_place - 1);
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
    template <bool>
    static __device__ __forceinline__ bool find_cut_row_tile(
        const Arguments& args, int counted_row_tile, Part& part) {
        return set_part(args, counted_row_tile, 0, part) && part.count > 1;
    }
};

template <bool> struct PartsOf { using type = FixedParts; };
template <> struct PartsOf<true> { using type = BalancedParts; };
using Parts = PartsOf<BALANCED>::type;
