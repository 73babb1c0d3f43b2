// Several users' functions, e0 to e<COUNT - 1>, of all pairs of one head: scores, slopes, visible
// pairs, gradients of arrays; and of tiles, what intervals say, by a whole warp and by each lane.
//
// The text of the expressions (helpers/expression_kernels.py) calls visit(score, mask, number) of
// each in visit_all. Grid: 1 block of 32 threads. Constants: Element, Arguments. No shared memory.
#include "common/constants.cuh"
#include "score/expression.cuh"

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
    unsigned char* flags;                                   // (expressions, 2, tiles)
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

extern "C" __global__ void evaluate_expressions(const __grid_constant__ Launch a) {
    Arguments args = arguments_of(a);
    const int lane = threadIdx.x, pairs = a.queries * a.keys;
    const auto visit = [&](auto score, auto mask, int number) {
        for (int i = 0; i < 8; ++i)
            args.dmods[i] = a.sums + i64(number) * a.num_sums + a.dmod_offsets[i];
        score.set_head(args, a.b, a.h, a.queries, a.keys);
        mask.set_head(args, a.b, a.h, a.queries, a.keys);
        for (int pair = lane; pair < pairs; pair += 32) {
            const int query = pair / a.keys, key = pair % a.keys;
            const i64 to = i64(number) * pairs + pair;
            a.results[to] = score.score(a.scores[pair], query, key);
            Real slope;
            a.values[to] = score.score(a.scores[pair], query, key, slope);
            a.slopes[to] = slope;
            score.add_gradients(a.scores[pair], a.ds[pair], query, key);
            a.visible[to] = mask.visible(query, key);
        }
        for (int i = 0; i < a.num_tiles; ++i) {
            const int* tile = a.tiles + 4 * i;
            unsigned char* flag = a.flags + 2 * i64(number) * a.num_tiles + i;
            const auto of_warp = mask.template visibility<true>(tile[0], tile[1], tile[2], tile[3]);
            if (lane == 0) flag[0] = static_cast<unsigned char>(of_warp);
            if (i % 32 != lane) continue;
            const auto own = mask.template visibility<false>(tile[0], tile[1], tile[2], tile[3]);
            flag[a.num_tiles] = static_cast<unsigned char>(own);
        }
    };
    visit_all(visit);
}
