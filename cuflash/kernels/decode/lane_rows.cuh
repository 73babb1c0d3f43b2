// The rows of a lane's C fragments in a decode kernel on tensor cores: which keys they see, how
// their scores are made. s[i][j][x] is of M tiles of 16 rows, N tiles of 8 keys.
#pragma once
#include "decode/row_tile.cuh"
#include "score/dropout.cuh"
#include "score/pair_mask.cuh"
#include "score/score_mod.cuh"

struct LaneRows {
    struct Row {
        int query;
        ScoreMod<float> score_mod;
        PairMask pair_mask;
        Dropout<float> dropout;
        __device__ __forceinline__ Row(const Arguments& args, const RowTile& rows, int row)
            : query(rows.query_of(row)), score_mod(args), pair_mask(args, rows.sequence.number),
              dropout(args) {
            const int batch = rows.sequence.number, head = rows.head_of(row);
            score_mod.set_head(args, batch, head);
            pair_mask.set_head(head);
            rows.set_user(args, score_mod, pair_mask, head);
            dropout.set_head(batch, head);
        }
        template <class Mask>
        __device__ __forceinline__ bool sees(const Mask& mask, int key) const {
            const bool is_visible = mask.visible(query, key);
            if constexpr (PAIRWISE)
                if (is_visible && query < mask.seqlen_q) return pair_mask.visible(query, key);
            return is_visible;
        }
    };
    const Arguments& args;
    const RowTile& rows;
    int first;                                              // the warp's first row in the tile
    float scale_log2;                                       // |scale| log2(e); not LINEAR: log2(e)

    __device__ __forceinline__ LaneRows(const Arguments& args, const RowTile& rows, int first = 0)
        : args(args), rows(rows), first(first),
          scale_log2(exponent_scale<LINEAR>(args.arrays.scale)) {}

    // The lane's row of 16-row tile i: the upper one or, of half 1, the lower.
    __device__ __forceinline__ int index(int i, int half) const {
        return first + i * 16 + half * 8 + threadIdx.x % 32 / 4;
    }
    __device__ __forceinline__ Row row(int i, int half) const {
        return Row(args, rows, index(i, half));
    }

    // Calls f(row, key, i, j, x) for each score s[i][j][x] of the lane.
    template <int M, int N, class F>
    __device__ __forceinline__ void for_each(int first_key, F f) const {
        const int lane = threadIdx.x % 32;
        #pragma unroll
        for (int i = 0; i < M; ++i)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Row of_half = row(i, half);
                #pragma unroll
                for (int j = 0; j < N; ++j)
                    #pragma unroll
                    for (int x = 0; x < 2; ++x)
                        f(of_half, first_key + j * 8 + lane % 4 * 2 + x, i, j, half * 2 + x);
            }
    }

    template <int M, int N, class Mask>
    __device__ __forceinline__ void apply_score_mod(
        float (&s)[M][N][4], const Mask& mask, int first_key) const {
        const int shift = mask.seqlen_k - mask.seqlen_q;
        for_each<M, N>(first_key, [&](const Row& row, int key, int i, int j, int x) {
            s[i][j][x] = row.score_mod.score(
                s[i][j][x], static_cast<float>(row.query + shift - key), row.query, key);
        });
    }

    // S = -inf where the query does not see the key. keep(i, j, x, is_visible): of each pair.
    // masked: RowTile::masked_eights().
    template <int M, int N, class Mask, class Keep>
    __device__ __forceinline__ void apply_mask(
        float (&s)[M][N][4], const Mask& mask, int first_key, u32 masked, Keep keep) const {
        const auto set = [&](int i, int j, int x, bool is_visible) {
            keep(i, j, x, is_visible);
            if (!is_visible) s[i][j][x] = -infinity();
        };
        if constexpr (MASK_MOD) {
            const HiddenPairs<M, N> hidden(*this, mask, first_key, masked);
            #pragma unroll
            for (int i = 0; i < M; ++i)
                #pragma unroll
                for (int j = 0; j < N; ++j)
                    #pragma unroll
                    for (int x = 0; x < 4; ++x) set(i, j, x, !hidden.holds(i, j, x));
        } else {
            for_each<M, N>(first_key, [&](const Row& row, int key, int i, int j, int x) {
                set(i, j, x, row.sees(mask, key));
            });
        }
    }

    template <int M, int N>
    __device__ __forceinline__ void apply_dropout(float (&p)[M][N][4], int first_key) const {
        for_each<M, N>(first_key, [&](const Row& row, int key, int i, int j, int x) {
            p[i][j][x] *= row.dropout.z(row.query, key);
        });
    }

private:
    // Which of the lane's pairs are hidden, by the user's mask or the bounds. A short loop tests
    // them, eight keys at a time: written out, the tests of a tile are a thousand instructions and
    // more, which come from memory when they run first, and most blocks run them once.
    template <int M, int N> struct HiddenPairs {
        static_assert(N <= 16, "two bits for each eight keys");
        u32 bits[M][2] = {};                                // 2 j + x: of column x of tile j

        template <class Mask>
        __device__ __forceinline__ HiddenPairs(
            const LaneRows& lane_rows, const Mask& mask, int first_key, u32 masked) {
            #pragma unroll 1
            for (u32 rest = masked; rest != 0; rest &= rest - 1) {
                const int j = __ffs(rest) - 1, key = first_key + j * 8 + threadIdx.x % 4 * 2;
                #pragma unroll
                for (int i = 0; i < M; ++i)
                    #pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const Row row = lane_rows.row(i, half);
                        const u32 pairs = (row.sees(mask, key) ? 0u : 1u)
                                        | (row.sees(mask, key + 1) ? 0u : 2u);
                        bits[i][half] |= pairs << 2 * j;
                    }
            }
        }
        __device__ __forceinline__ bool holds(int i, int j, int x) const {
            return bits[i][x / 2] >> (2 * j + x % 2) & 1;
        }
    };
};
