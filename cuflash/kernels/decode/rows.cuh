// decode/forward.cu's shared memory, and the steps of a key tile in C fragments.
#pragma once
#include "sm80/online_softmax.cuh"
#include "decode/key_rows.cuh"
#include "decode/lane_rows.cuh"

constexpr int THREADS = NUM_WARPS * 32, WARP_KEYS = 16;
constexpr int M_TILES = BLOCK_Q / 16, S_TILES = WARP_KEYS / 8, O_TILES = HEAD_DIM_V / 8;

static_assert(BLOCK_Q % 16 == 0, "rows come in tiles of 16");
static_assert(BLOCK_K == NUM_WARPS * WARP_KEYS, "a warp has 16 keys of each tile");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0, "head_dim is padded to a multiple of 32");

using SoftmaxState = SoftmaxStateOf<M_TILES>;
using Scores = float[M_TILES][S_TILES][4];
using Output = float[M_TILES][O_TILES][4];
using Visible = bool[M_TILES][S_TILES][4];

// A warp's state of each row, after its last key. Rows are padded so that the lanes of a C
// fragment, in eight rows, store to different banks.
struct WarpStates {
    float m[NUM_WARPS][BLOCK_Q], l[NUM_WARPS][BLOCK_Q];
    float acc[NUM_WARPS][BLOCK_Q][HEAD_DIM_V + 8];
};

// A tile of keys as they are stored. Float8 numbers are loaded as half as many of 16 bits.
constexpr bool IS_FLOAT8 = sizeof(Cached) == 1;
template <int COLUMNS>
using StoredTile = SmemTile<WARP_KEYS, IS_FLOAT8 ? COLUMNS / 2 : COLUMNS>;

struct Tiles {
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    StoredTile<HEAD_DIM> k[NUM_WARPS][NUM_STAGES];
    StoredTile<HEAD_DIM_V> v[NUM_WARPS][NUM_STAGES];
};
// If pages have scales: of each key, its page's.
struct ScaledTiles : Tiles {
    float scales[NUM_WARPS][NUM_STAGES][2][WARP_KEYS];      // of K, of V
};
template <bool> struct TilesOf { using type = Tiles; };
template <> struct TilesOf<true> { using type = ScaledTiles; };

union SharedPlan {
    TilesOf<SCALES == SCALES_OF_PAGES>::type tiles;
    WarpStates states;                                      // once all tiles have been read
};
static_assert(sizeof(SharedPlan) <= SHARED_BYTES, "the plan and the kernel disagree");

// The softmax takes |scale|.
__device__ __forceinline__ void negate_if_needed(Scores& s) {
    if (NEGATE_SCORES)
        for (auto& tile : s)
            for (auto& fragment : tile)
                for (float& x : fragment) x = -x;
}

// S = Q K^T, or its negative.
__device__ __forceinline__ void score_gemm(Scores& s, u32 q_smem, u32 k_smem) {
    set_zero(s);
    const OperandA<BLOCK_Q, Stored::AS_NAMED, M_TILES> queries(q_smem, 0);
    const OperandB<WARP_KEYS, Stored::TRANSPOSED, S_TILES / 2> keys(k_smem, 0);
    gemm<Element, HEAD_DIM / 16>(s, queries, keys);
    negate_if_needed(s);
}

// Calls f(s[i][j][x], key) with the place of each score's key among the warp's.
template <class F> __device__ __forceinline__ void for_each_key(Scores& s, F f) {
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < S_TILES; ++j)
            #pragma unroll
            for (int x = 0; x < 4; ++x) f(s[i][j][x], j * 8 + threadIdx.x % 4 * 2 + x % 2);
}

// The column of O of the lane's acc[i][j][x].
__device__ __forceinline__ int output_column(int j, int x) {
    const int place = threadIdx.x % 4 * 2 + x % 2;          // among a tile's eight
    return IS_FLOAT8 ? j / 2 * 16 + place * 2 + j % 2       // float8_rows.cuh
                     : j * 8 + place;
}

// What V is multiplied by: with float8 caches, P as float16, which has more bits than bfloat16. It
// is rounded relative to WEIGHT_FACTOR, as float16 numbers are multiples of 2^-24. With scales of
// pages, P v_scale, which need not be a float16, as Element: float8 numbers reach 448, so v_scale
// is that much smaller than the values.
template <bool> struct WeightOf { using type = Element; };
template <> struct WeightOf<true> { using type = float16; };
using Weight = WeightOf<IS_FLOAT8 && SCALES != SCALES_OF_PAGES>::type;
constexpr float WEIGHT_FACTOR = !IS_FLOAT8 ? 1.0f : SCALES == SCALES_OF_PAGES ? 512.0f : 32768.0f;

using Values = OperandB<WARP_KEYS, Stored::AS_NAMED, O_TILES / 2>;

// acc += P V.
__device__ __forceinline__ void accumulate(Output& acc, const Scores& p, u32 v_smem) {
    const RegisterA<Element, M_TILES, S_TILES> weights(p);
    gemm<Element, WARP_KEYS / 16, WARP_KEYS / 16>(acc, weights, Values(v_smem, 0));
}

// Whether the warp's tile of V holds a NaN or an infinity.
__device__ __forceinline__ bool holds_nonfinite(u32 v_smem) {
    u32 found = 0;
    for_each_chunk<WARP_KEYS, HEAD_DIM_V, 32>(threadIdx.x % 32, [&](int row, int column) {
        const uint4 x = load_shared_16(v_smem + tile_offset<WARP_KEYS>(row, column));
        found |= nonfinite_bits<Element>(x.x) | nonfinite_bits<Element>(x.y)
               | nonfinite_bits<Element>(x.z) | nonfinite_bits<Element>(x.w);
    });
    return __ballot_sync(WHOLE_WARP, found != 0) != 0;
}

// The same where V holds a NaN or an infinity, which must not reach rows that do not see its key,
// as 0 * NaN: the product takes only finite values, the others are added pair by pair. Slow, rare.
__device__ __forceinline__ void accumulate_visible(
    Output& acc, const Scores& p, const Visible& visible, u32 v_smem) {
    const RegisterA<Element, M_TILES, S_TILES> weights(p);
    gemm<Element, WARP_KEYS / 16, WARP_KEYS / 16>(
        acc, weights, Sanitized<Element, Values>{Values(v_smem, 0)});
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int key = 0; key < WARP_KEYS; ++key) {
        const int owner = lane / 4 * 4 + key % 8 / 2;       // of the quad, has the pair's P
        #pragma unroll
        for (int i = 0; i < M_TILES; ++i)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int x = half * 2 + key % 2;
                const float weight = __shfl_sync(WHOLE_WARP, p[i][key / 8][x], owner);
                const bool sees = __shfl_sync(
                    WHOLE_WARP, static_cast<int>(visible[i][key / 8][x]), owner) != 0;
                #pragma unroll
                for (int j = 0; j < O_TILES; ++j) {
                    const int column = output_column(j, 0);
                    const u32 pair = __float_as_int(load_shared_float(
                        v_smem + tile_offset<WARP_KEYS>(key, column)));
                    const float values[2] = {to_float(low_half<Element>(pair)),
                                             to_float(high_half<Element>(pair))};
                    #pragma unroll
                    for (int c = 0; c < 2; ++c)
                        if (sees && !(fabsf(values[c]) < infinity()))
                            acc[i][j][half * 2 + c] += weight * values[c];
                }
            }
    }
}
