// Several users' functions, e0 to e<COUNT - 1>, of all pairs of one head: scores, slopes, visible
// pairs, gradients of arrays; and of tiles, what intervals say, by a whole warp and by each lane,
// whether all reads are inside the arrays, and whether scores are affine in the key.
//
// The text of the expressions (helpers/expression_kernels.py) calls visit(score, mask, grid,
// number) of each in visit_all. Grid: 1 block of 32 threads. Constants: Element, Arguments. No
// shared memory.
#include "common/constants.cuh"
#include "score/lane_grid.cuh"

// The pairs of a warp of each family in a tile of 32 x 32.
template <int> struct Grid { using type = FragmentGrid<4, 8>; };
template <> struct Grid<1> {
    using type = LaneGrid<LaneAxis<8, 2, 8, 0x03>, LaneAxis<4, 1, 8, 0x1C>>;
};
template <> struct Grid<2> {
    using type = LaneGrid<LaneAxis<8, 1, 4, 0x11>, LaneAxis<4, 1, 8, 0x0E>>;
};
template <> struct Grid<3> {
    using type = LaneGrid<LaneAxis<4, 1, 8, 0x1C>, LaneAxis<8, 1, 4, 0x03>>;
};

#include "score/affine.cuh"

using Real = Accumulator<Element>;

struct Launch {
    const void *a0, *a1, *a2, *a3, *a4, *a5, *a6, *a7;      // mod_arrays
    const u64* numbers;
    const i64 *strides, *dmod_strides;
    const int* sizes;
    const i64* dmod_offsets;                                // within an expression's sums
    const Real *scores, *ds;                                // (queries, keys)
    Real *results, *values, *slopes;                        // (expressions, queries, keys)
    unsigned char* visible;                                 // (expressions, queries, keys)
    const int* tiles;                                       // (tiles, 4): first and last
    unsigned char* flags;                                   // (expressions, 5, tiles)
    Real* sums;                                             // (expressions, num_sums)
    int b, h, queries, keys, num_tiles, num_sums;
};

inline Arguments arguments_of(const Launch& a) {
    Arguments args{};
    const void* arrays[] = {a.a0, a.a1, a.a2, a.a3, a.a4, a.a5, a.a6, a.a7};
    for (int i = 0; i < 8; ++i) {
        args.mod_arrays[i] = arrays[i];
        args.mod_numbers[i] = a.numbers[i];
    }
    for (int i = 0; i < 32; ++i) {
        args.expression.strides[i] = a.strides[i];
        args.expression.dmod_strides[i] = a.dmod_strides[i];
        args.expression.sizes[i] = a.sizes[i];
    }
    return args;
}

inline bool same(Real x, Real y) { return x == y || (x != x && y != y); }

// Of a tile: 0 if reads may leave the arrays, 1 if they do not, and scores without tests are the
// same, 2 if they differ.
template <class Score>
inline unsigned char same_inside(const Launch& a, const Score& score, const int* tile) {
    if (!Score::READS || !score.reads_inside(tile[0], tile[1], tile[2], tile[3])) return 0;
    for (int query = tile[0]; query <= tile[1]; ++query)
        for (int key = tile[2]; key <= tile[3]; ++key) {
            const Real x = a.scores[query * a.keys + key];
            Real slope, tested;
            const Real y = score.template score<true>(x, Real(1), query, key, slope);
            if (!same(y, score.score(x, Real(1), query, key, tested))) return 2;
            if (!same(slope, tested)) return 2;
            if (!same(score.template score<true>(x, Real(1), query, key), y)) return 2;
        }
    return 1;
}

// Of a tile: 0 if scores are not affine in the key, 1 if they are, and g of any key follows from
// that of the first, 2 if it does not. For arrays and numbers with which nothing is rounded.
template <class Score>
inline unsigned char follows_from_first_key(const Launch& a, const Score& score, const int* tile) {
    if constexpr (Score::AFFINE) {
        if (!is_affine<Real>(score, tile[0], tile[1], tile[2], tile[3])) return 0;
        const Real step = score.step(tile[0], tile[2]);
        for (int query = tile[0]; query <= tile[1]; ++query)
            for (int key = tile[2]; key <= tile[3]; ++key) {
                const Real x = a.scores[query * a.keys + key];
                const Real g = score.added(query, tile[2]) + step * Real(key - tile[2]);
                if (!same(score.score(x, Real(1), query, key), x + g)) return 2;
            }
        return 1;
    } else {
        return 0;
    }
}

template <class Mask> inline unsigned char mask_is_same_inside(const Mask& mask, const int* tile) {
    if (!Mask::READS || !mask.reads_inside(tile[0], tile[1], tile[2], tile[3])) return 0;
    for (int query = tile[0]; query <= tile[1]; ++query)
        for (int key = tile[2]; key <= tile[3]; ++key)
            if (mask.template visible<true>(query, key) != mask.visible(query, key)) return 2;
    return 1;
}

template <class Pairs, class Score>
inline void add_gradients(const Launch& a, const Score& score, int q_start, int k_start) {
    using Queries = typename Pairs::Queries;
    using Keys = typename Pairs::Keys;
    const int lane = threadIdx.x;
    const Pairs pairs{q_start + Queries::rank(lane) * Queries::TOGETHER,
                      k_start + Keys::rank(lane) * Keys::TOGETHER};
    typename Score::template Gradients<Pairs> sums;
    for (int i = 0; i < Queries::COUNT; ++i)
        for (int j = 0; j < Keys::COUNT; ++j) {
            const int query = pairs.query + Queries::offset(i), key = pairs.key + Keys::offset(j);
            if (query >= a.queries || key >= a.keys) continue;
            const i64 from = i64(query) * a.keys + key;
            score.add_gradients(sums, pairs, i, j, a.scores[from], a.ds[from]);
        }
    score.finish_gradients(sums, pairs);
}

extern "C" __global__ void evaluate_expressions(const __grid_constant__ Launch a) {
    Arguments args = arguments_of(a);
    const int lane = threadIdx.x, pairs = a.queries * a.keys;
    const auto visit = [&](auto score, auto mask, auto grid, int number) {
        for (int i = 0; i < 8; ++i)
            args.dmods[i] = a.sums + i64(number) * a.num_sums + a.dmod_offsets[i];
        score.set_head(args, a.b, a.h, a.queries, a.keys);
        mask.set_head(args, a.b, a.h, a.queries, a.keys);
        for (int pair = lane; pair < pairs; pair += 32) {
            const int query = pair / a.keys, key = pair % a.keys;
            const i64 to = i64(number) * pairs + pair;
            a.results[to] = score.score(a.scores[pair], Real(1), query, key);
            Real slope;
            a.values[to] = score.score(a.scores[pair], Real(1), query, key, slope);
            a.slopes[to] = slope;
            a.visible[to] = mask.visible(query, key);
        }
        for (int q_start = 0; q_start < a.queries; q_start += 32)
            for (int k_start = 0; k_start < a.keys; k_start += 32)
                add_gradients<typename decltype(grid)::type>(a, score, q_start, k_start);
        for (int i = 0; i < a.num_tiles; ++i) {
            const int* tile = a.tiles + 4 * i;
            unsigned char* flag = a.flags + 5 * i64(number) * a.num_tiles + i;
            const auto of_warp = mask.template visibility<true>(tile[0], tile[1], tile[2], tile[3]);
            if (lane == 0) flag[0] = static_cast<unsigned char>(of_warp);
            if (i % 32 != lane) continue;
            const auto own = mask.template visibility<false>(tile[0], tile[1], tile[2], tile[3]);
            flag[a.num_tiles] = static_cast<unsigned char>(own);
            flag[2 * a.num_tiles] = same_inside(a, score, tile);
            flag[3 * a.num_tiles] = mask_is_same_inside(mask, tile);
            flag[4 * a.num_tiles] = follows_from_first_key(a, score, tile);
        }
    };
    visit_all(visit);
}
