// Which keys a query sees: the masks that follow from positions, for a pair and for tiles of pairs.
//
// Key j is visible to query i iff, with shift = seqlen_k - seqlen_q,
//     j < seqlen_k                              (the array has that key)
//     j <= i + shift                            (CAUSAL: aligned at the bottom right)
//     i + shift - left <= j <= i + shift + right          (WINDOW; a causal one has right = 0)
// so query i sees the keys first_key(i) .. num_keys(i) - 1, neither of which decreases with i.
// Everything below follows from that. The functions for tiles ignore rows past seqlen_q; each
// kernel handles those itself (they are not stored; P = 0 in sums over queries).
#pragma once
#include "common/types.cuh"

// The key tiles of a query tile: [first_full, num_full) are entirely visible, the others of [first,
// num_visited) partly, the rest not at all. Without a left bound first and first_full are 0.
struct KeyTiles {
    int num_full, num_visited, first, first_full;
    bool full(int tile) const { return tile >= first_full && tile < num_full; }
};

// The query tiles of a key tile: those before `first` see nothing of it, [first_full, end_full) see
// all of it. The others before `end` see part of it or (the last one) have rows past seqlen_q.
struct QueryTiles {
    int first, first_full, end_full, end;
    bool full(int tile) const { return tile >= first_full && tile < end_full; }
};

// The bounds of a call's window. With lengths and bounds below 2^30 all sums stay below 2^31.
template <bool WINDOW> struct Window {};
template <> struct Window<true> { int left, right; };

// From the call's arguments.
template <bool WINDOW, class Arguments>
inline Window<WINDOW> window_of(const Arguments& arguments) {
    if constexpr (WINDOW) return {arguments.options.window_left, arguments.options.window_right};
    else return {};
}

template <bool CAUSAL, bool WINDOW = false>
struct Mask {
    int seqlen_q, seqlen_k;
    Window<WINDOW> window;

    static constexpr int clamp(int x, int low, int high) {
        return x < low ? low : x > high ? high : x;
    }
    static constexpr int num_tiles(int length, int block) { return (length + block - 1) / block; }

    // Query i sees the keys [first_key(i), num_keys(i)).
    int num_keys(int query) const {
        if constexpr (WINDOW)
            return clamp(query + (seqlen_k - seqlen_q) + window.right + 1, 0, seqlen_k);
        else
            return CAUSAL ? clamp(query + (seqlen_k - seqlen_q) + 1, 0, seqlen_k) : seqlen_k;
    }
    int first_key(int query) const {
        if constexpr (WINDOW)
            return clamp(query + (seqlen_k - seqlen_q) - window.left, 0, seqlen_k);
        else
            return 0;
    }

    bool visible(int query, int key) const {
        if (WINDOW && key < first_key(query)) return false;
        return key < num_keys(query);
    }

    // Key j is seen by the queries [first_query(j), end_query(j)); by none if j >= seqlen_k.
    int first_query(int key) const {
        if (key >= seqlen_k) return seqlen_q;
        if constexpr (WINDOW) return clamp(key - (seqlen_k - seqlen_q) - window.right, 0, seqlen_q);
        else return CAUSAL ? clamp(key - (seqlen_k - seqlen_q), 0, seqlen_q) : 0;
    }
    int end_query(int key) const {
        if constexpr (WINDOW)
            return clamp(key - (seqlen_k - seqlen_q) + window.left + 1, 0, seqlen_q);
        else
            return seqlen_q;
    }

    // The same bounds in two steps, to hold one register instead of two: the end follows from the
    // unclamped first query, which may be negative.
    int open_first_query(int key) const {
        if constexpr (WINDOW)
            return key < seqlen_k ? key - (seqlen_k - seqlen_q) - window.right : seqlen_q;
        else
            return first_query(key);
    }
    int end_after(int open_first) const {
        if constexpr (WINDOW)
            return min(open_first + (window.left + window.right + 1), seqlen_q);
        else
            return seqlen_q;
    }

    int last_query(int q_start, int block_q) const {
        return q_start + block_q < seqlen_q ? q_start + block_q - 1 : seqlen_q - 1;
    }

    KeyTiles key_tiles(int q_start, int block_q, int block_k) const {
        const int last = last_query(q_start, block_q);
        const int most = num_keys(last), fewest = num_keys(q_start);
        if constexpr (WINDOW)
            return {fewest / block_k, num_tiles(most, block_k), first_key(q_start) / block_k,
                    num_tiles(first_key(last), block_k)};
        else
            return {fewest / block_k, num_tiles(most, block_k), 0, 0};
    }

    QueryTiles query_tiles(int k_start, int block_q, int block_k) const {
        const int end = num_tiles(seqlen_q, block_q);
        const int first_any = first_query(k_start);         // sees the tile's first key
        const int first_all = first_query(k_start + block_k - 1);    // sees its last key, so all
        QueryTiles tiles = {first_any < seqlen_q ? first_any / block_q : end,
                            first_all < seqlen_q ? num_tiles(first_all, block_q) : end,
                            seqlen_q / block_q, end};
        if constexpr (WINDOW) {
            const int last_key = clamp(k_start + block_k, 0, seqlen_k) - 1;
            tiles.end = clamp(num_tiles(end_query(last_key), block_q), tiles.first, end);
            tiles.end_full = end_query(k_start) / block_q;
        }
        return tiles;
    }
};
