// Which keys a query sees. Every kernel asks here: about a pair, and about tiles of pairs.
//
// Key j is visible to query i iff
//     j < seqlen_k                              (the array has that key)
//     j <= i + seqlen_k - seqlen_q              (CAUSAL: aligned at the bottom right)
// so query i sees the keys 0 .. num_keys(i) - 1, and num_keys does not decrease with i.
// Everything below follows from that. A query past seqlen_q is no query: a tile's answer is about
// those it really has, and what becomes of the other rows (not stored; P = 0 in sums over queries)
// is the kernel's business.
#pragma once

// Key tiles of a query tile: [0, num_full) all visible, [num_full, num_visited) partly,
// the others not at all.
struct KeyTiles { int num_full, num_visited; };

// Query tiles of a key tile: those before `first` see nothing of it, [first_full, end_full) all of
// it. The others before `end` see part of it or (the last one) have rows past seqlen_q.
struct QueryTiles {
    int first, first_full, end_full, end;
    bool full(int tile) const { return tile >= first_full && tile < end_full; }
};

template <bool CAUSAL>
struct Mask {
    int seqlen_q, seqlen_k;

    static constexpr int clamp(int x, int low, int high) {
        return x < low ? low : x > high ? high : x;
    }
    static constexpr int num_tiles(int length, int block) { return (length + block - 1) / block; }

    // Query i sees the keys [0, num_keys(i)).
    int num_keys(int query) const {
        return CAUSAL ? clamp(query + (seqlen_k - seqlen_q) + 1, 0, seqlen_k) : seqlen_k;
    }

    bool visible(int query, int key) const { return key < num_keys(query); }

    // The first query that sees key j, seqlen_q if none does. The inverse of num_keys.
    int first_query(int key) const {
        if (key >= seqlen_k) return seqlen_q;
        return CAUSAL ? clamp(key - (seqlen_k - seqlen_q), 0, seqlen_q) : 0;
    }

    int last_query(int q_start, int block_q) const {
        return q_start + block_q < seqlen_q ? q_start + block_q - 1 : seqlen_q - 1;
    }

    KeyTiles key_tiles(int q_start, int block_q, int block_k) const {
        const int most = num_keys(last_query(q_start, block_q)), fewest = num_keys(q_start);
        return {fewest / block_k, num_tiles(most, block_k)};
    }

    QueryTiles query_tiles(int k_start, int block_q, int block_k) const {
        const int end = num_tiles(seqlen_q, block_q);
        const int first_any = first_query(k_start);                  // sees the tile's first key
        const int first_all = first_query(k_start + block_k - 1);    // sees its last key, hence all
        return {first_any < seqlen_q ? first_any / block_q : end,
                first_all < seqlen_q ? num_tiles(first_all, block_q) : end,
                seqlen_q / block_q, end};
    }
};
