// pair_mask.cuh for kernels of calls without options. What has no body is not to be called.
#pragma once
#include "common/mask.cuh"
#include "score/expression.cuh"

constexpr bool PAIRWISE = false, SKIPS_TILES = false;
constexpr int HIDDEN_GROUPS = 0, VISIBILITY_OF_FLAG = 3, HIDDEN_SHIFT = 2;

bool disjoint(IdRange a, IdRange b);

template <int WORDS, class Arguments>
void load_mask_bits(u32 (&)[WORDS], const Arguments&, int, int, int, int);

template <class> struct PairMaskOf {
    int batch, head;
    MaskExpression user;

    template <class Arguments> PairMaskOf(const Arguments&, int) {}
    void set_head(int) {}
    void set_user(int sequence, int seqlen_q, int seqlen_k);
    int id_of_query(int query) const;
    int id_of_key(int key) const;
    bool keeps(int query, int key) const;
    bool has_chunks() const;
    uint4 chunk_of_mask(int query, int key) const;
    static u32 keeps_of_chunk(uint4 chunk);
    u32 keeps_of_sixteen(int query, int key) const;
    bool visible(int, int) const { return true; }
    bool skips(int, int) const { return false; }
    bool sees_all(int, int) const { return true; }
    IdRange ids_of_queries(int tile) const;
    IdRange ids_of_keys(int tile) const;
    int key_tile_before(int, int k_tile, int) const { return k_tile - 1; }
    int query_tile_before(int q_tile, int, int) const { return q_tile - 1; }
    int query_tile_after(int q_tile, int, int) const { return q_tile + 1; }
    int query_tiles_between(int first, int end, int k_tile) const;
    int key_tiles_before(int q_tile, int k_tile, int first) const;
    template <class IsVisited> static int first_tile(int first, int end, IsVisited);
    template <class IsVisited> static int last_tile(int first, int end, IsVisited);
};
using PairMask = PairMaskOf<Arguments>;
