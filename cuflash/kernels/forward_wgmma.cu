// Forward attention for 16-bit types on Hopper (sm_90a): TMA loads, warpgroup products.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// FlashAttention-3 (arXiv:2407.08608). A block stays on its multiprocessor and takes one tile of
// BLOCK_Q queries of one head after another. Warpgroup 0 only loads. Each of the others has 64
// queries of the tile and walks the key tiles that they see from the last to the first, with the
// running maximum m of S, the sum l of P = exp(scale (S - m)) and the unnormalised acc = P V.
//
// Two overlaps hide the exponentials. Within a warpgroup, S of the next key tile and P V of this
// one are issued together; the softmax of the next tile runs while P V does. Between warpgroups,
// named barriers let one issue its products at a time, so that they take turns at the tensor cores.
// The "next key tile" may be the first of the next query tile: nothing drains between tiles.
//
// Grid: as many blocks as multiprocessors, or as tiles if those are fewer. Tiles are numbered by
// scheduler.cuh, longest first.
// Block: 1 + MATH_WARPGROUPS warpgroups.
//
// Constants: Element, CAUSAL, NEGATE_SCORES (scale < 0), HEAD_DIM and HEAD_DIM_V (multiples of 16
// and one of those that wgmma_registers is written for), BLOCK_Q, BLOCK_K, Q_STAGES, KV_STAGES,
// SHARED_BYTES.
// Shared memory: SharedPlan, tiles as in smem.cuh.
//
// Barriers: *_full, the TMA unit to the math warpgroups: an arrival of a loading thread, and a
// tile's bytes. *_empty, back: an arrival of every math warp.
//
// Rows whose result hangs on more than this arithmetic gives (NaN, infinities, scores above 2^24)
// are found at the end of a tile and computed again, one by one: exact_row. Slow, rare.
#include "mask.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"

constexpr int MATH_WARPGROUPS = BLOCK_Q / 64, MATH_WARPS = MATH_WARPGROUPS * 4;
constexpr int THREADS = (1 + MATH_WARPGROUPS) * WARPGROUP;
constexpr int S_COUNT = BLOCK_K / 2, O_COUNT = HEAD_DIM_V / 2, P_COUNT = BLOCK_K / 4;
constexpr int WIDEST = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;

static_assert(BLOCK_Q == 128 || BLOCK_Q == 192, "two or three math warpgroups");
static_assert(BLOCK_K % 16 == 0 && HEAD_DIM % 16 == 0, "products sum over 16 elements");

// A tile of queries, and how many key tiles it walks: at least one, which the mask may hide wholly.
// There is none after a tile of -1.
struct Work { TileOfHead where; int num_full, num_visited; };

struct SharedPlan {
    Tile<BLOCK_Q, WIDEST> q_then_out[Q_STAGES];
    Tile<BLOCK_K, HEAD_DIM> k[KV_STAGES];
    Tile<BLOCK_K, HEAD_DIM_V> v[KV_STAGES];
    u64 q_full[Q_STAGES], q_empty[Q_STAGES];
    u64 k_full[KV_STAGES], k_empty[KV_STAGES], v_full[KV_STAGES], v_empty[KV_STAGES];
    Work work[Q_STAGES];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// Barrier 0 is __syncthreads. Barrier 1 + w: warpgroup w may issue its products.
constexpr int FIRST_TURN = 1, TURN_THREADS = 2 * WARPGROUP;

// ---- The warpgroup that loads ----

__device__ __forceinline__ Work work(const ForwardArguments& arguments, int index) {
    const Shape& shape = arguments.shape;
    const int tiles = (shape.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
    if (index >= tiles * shape.num_heads_q * shape.batch) return {{-1, 0, 0}, 0, 0};
    TileOfHead where =
        tile_of_block(index, tiles, shape.num_heads_q, shape.batch, arguments.schedule);
    if (CAUSAL) where.tile = tiles - 1 - where.tile;
    const Mask<CAUSAL> mask{shape.seqlen_q, shape.seqlen_k};
    const KeyTiles keys = mask.key_tiles(where.tile * BLOCK_Q, BLOCK_Q, BLOCK_K);
    return {where, keys.num_full, max(keys.num_visited, 1)};
}

// One tile, a panel of 64 columns at a time.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void load(
    u32 tile, const TensorMap& map, u32 full, int token, int head, int batch) {
    mbarrier_arrive_expect(full, ROWS * num_panels(COLUMNS) * PANEL_ROW_BYTES);
    #pragma unroll
    for (int panel = 0; panel < num_panels(COLUMNS); ++panel)
        tma_load(tile + panel * ROWS * PANEL_ROW_BYTES, map, full, panel * PANEL_COLUMNS, token,
                 head, batch);
}

// Two threads load, so that the next Q need not wait for this one's last keys. The first also says
// what to do: the work goes with its Q.
__device__ __forceinline__ void load_queries(const ForwardWgmmaArguments& arguments,
                                             SharedPlan& shared) {
    Ring<Q_STAGES> ring;
    for (int index = blockIdx.x;; index += gridDim.x, ring.next()) {
        const Work now = work(arguments.arrays, index);
        const u32 full = shared_address(&shared.q_full[ring.stage]);
        wait(shared_address(&shared.q_empty[ring.stage]), ring.parity ^ 1);
        shared.work[ring.stage] = now;
        if (now.where.tile < 0) {
            mbarrier_arrive(full);
            return;
        }
        load<BLOCK_Q, HEAD_DIM>(
            shared_address(&shared.q_then_out[ring.stage]), arguments.q_map, full,
            now.where.tile * BLOCK_Q, now.where.head, now.where.batch);
    }
}

__device__ __forceinline__ void load_keys(const ForwardWgmmaArguments& arguments,
                                          SharedPlan& shared) {
    const Shape& shape = arguments.arrays.shape;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    Ring<KV_STAGES> ring;
    for (int index = blockIdx.x;; index += gridDim.x) {
        const Work now = work(arguments.arrays, index);
        if (now.where.tile < 0) return;
        const int batch = now.where.batch, head = now.where.head / group_size;
        for (int tile = now.num_visited - 1; tile >= 0; --tile, ring.next()) {
            wait(shared_address(&shared.k_empty[ring.stage]), ring.parity ^ 1);
            load<BLOCK_K, HEAD_DIM>(
                shared_address(&shared.k[ring.stage]), arguments.k_map,
                shared_address(&shared.k_full[ring.stage]), tile * BLOCK_K, head, batch);
            wait(shared_address(&shared.v_empty[ring.stage]), ring.parity ^ 1);
            load<BLOCK_K, HEAD_DIM_V>(
                shared_address(&shared.v[ring.stage]), arguments.v_map,
                shared_address(&shared.v_full[ring.stage]), tile * BLOCK_K, head, batch);
        }
    }
}

// ---- The warpgroups that compute ----

// Of the lane's two rows, which are 8 apart. l: this lane's share of the sum.
struct Rows { float m[2], l[2]; };

// What m is multiplied to be subtracted: 2^(c S - reference).
__device__ __forceinline__ float reference(float m, float c) {
    return m == -infinity() ? 0.0f : m * c;                 // else 2^(-inf + inf)
}

// S = -inf where the row does not see the key.
__device__ __forceinline__ void apply_mask(
    float (&s)[S_COUNT], const Mask<CAUSAL>& mask, int first_row, int k_start) {
    const int first_key = k_start + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int seen = mask.num_keys(first_row + half * 8) - first_key;
        #pragma unroll
        for (int j = 0; j < S_COUNT / 4; ++j)
            #pragma unroll
            for (int x = 0; x < 2; ++x)
                if (j * 8 + x >= seen) s[j * 4 + half * 2 + x] = -infinity();
    }
}

// m' = max(m, rowmax(S)),  P = 2^(c S - c m'),  l' = l 2^(c m - c m') + rowsum(P): S becomes P. The
// factor by which l, and acc, shrink is given back.
//
// The product c S is not rounded before c m', which is, is subtracted. That multiplies a row's P by
// 2^(c m - round(c m)), in l and acc alike; store() takes it out of lse.
template <bool MASKED>
__device__ __forceinline__ void softmax(
    float (&s)[S_COUNT], Rows& rows, float c, float (&rescale)[2]) {
    float subtracted[2];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        float m = s[half * 2];
        #pragma unroll
        for (int j = 0; j < S_COUNT / 4; ++j)
            m = fmaxf(fmaxf(m, s[j * 4 + half * 2]), s[j * 4 + half * 2 + 1]);
        m = fmaxf(rows.m[half], quad_max(m));
        subtracted[half] = MASKED ? reference(m, c) : m * c;
        rescale[half] = exp2_approx(rows.m[half] * c - subtracted[half]);
        rows.m[half] = m;
        rows.l[half] *= rescale[half];
    }
    #pragma unroll
    for (int i = 0; i < S_COUNT; ++i) {
        s[i] = exp2_approx(s[i] * c - subtracted[i / 2 % 2]);
        rows.l[i / 2 % 2] += s[i];
    }
}

// P as the A operand of P V: an accumulator's order is a fragment's order.
__device__ __forceinline__ void pack_scores(u32 (&p)[P_COUNT], const float (&s)[S_COUNT]) {
    #pragma unroll
    for (int i = 0; i < P_COUNT; ++i) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
}

// One row of the tile from the definition, by one warp: out to shared memory, lse to `lse`.
__device__ __forceinline__ void exact_row(
    const ForwardArguments& arguments, TileOfHead where, u32 out_tile, int row, float c,
    float* lse) {
    const Shape& shape = arguments.shape;
    const int lane = threadIdx.x % 32, query = where.tile * BLOCK_Q + row;
    const int kv_head = where.head / (shape.num_heads_q / shape.num_heads_kv);
    const int seen = Mask<CAUSAL>{shape.seqlen_q, shape.seqlen_k}.num_keys(query);
    const Strides qs = arguments.q_stride, ks = arguments.k_stride, vs = arguments.v_stride;
    const Element* q = static_cast<const Element*>(arguments.q)
                     + where.batch * qs.batch + where.head * qs.head + query * qs.token;
    const Element* k = static_cast<const Element*>(arguments.k)
                     + where.batch * ks.batch + kv_head * ks.head;
    const Element* v = static_cast<const Element*>(arguments.v)
                     + where.batch * vs.batch + kv_head * vs.head;
    const auto score = [&](int key) {
        float s = 0.0f;
        for (int d = 0; d < shape.head_dim; ++d)
            s += to_float(q[d]) * to_float(k[key * ks.token + d]);
        return NEGATE_SCORES ? -s : s;
    };
    float m = -infinity(), l = 0.0f, acc[(HEAD_DIM_V + 31) / 32] = {};
    for (int key = lane; key < seen; key += 32) m = fmaxf(m, score(key));
    for (int i = 1; i < 32; i *= 2) m = fmaxf(m, __shfl_xor_sync(WHOLE_WARP, m, i));
    const float subtracted = reference(m, c);
    for (int start = 0; start < seen; start += 32) {
        const float mine =
            start + lane < seen ? exp2_of_product(score(start + lane), c, subtracted) : 0.0f;
        for (int i = 0; i < min(32, seen - start); ++i) {
            const float p = __shfl_sync(WHOLE_WARP, mine, i);
            l += p;
            #pragma unroll
            for (int j = 0; j < (HEAD_DIM_V + 31) / 32; ++j)
                if (lane + j * 32 < shape.head_dim_v)
                    acc[j] += p * to_float(v[(start + i) * vs.token + lane + j * 32]);
        }
    }
    const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
    #pragma unroll
    for (int j = 0; j < (HEAD_DIM_V + 31) / 32; ++j)
        if (lane + j * 32 < shape.head_dim_v)
            store_shared(out_tile + tile_offset<BLOCK_Q>(row, lane + j * 32),
                         static_cast<u16>(pack<Element>(acc[j] * inverse, 0.0f)));
    if (lse != nullptr && lane == 0) {
        const float scale = fabsf(static_cast<float>(arguments.scale));
        *lse = l == 0.0f ? -infinity() : m * scale + logf(l);
    }
}

// O = acc / l and lse = |scale| m + log(l); rows that saw no key: 0 and -inf. O goes to the warp's
// rows in the place of Q. cut: the mask cuts some of the key tiles.
__device__ __forceinline__ void store(
    const ForwardArguments& arguments, TileOfHead where, u32 out_tile, float (&acc)[O_COUNT],
    const Rows& rows, float c, bool cut) {
    constexpr float LN_2 = 0.6931471805599453f;
    const Shape& shape = arguments.shape;
    const int lane = threadIdx.x % 32, warp_row = (threadIdx.x / 32 - 4) * 16;
    const int tile_start = where.tile * BLOCK_Q;
    float* lse = static_cast<float*>(arguments.lse);
    if (lse != nullptr)
        lse += (static_cast<i64>(where.batch) * shape.num_heads_q + where.head) * shape.seqlen_q
             + tile_start;

    // Of both rows. A NaN or an infinity in V spreads where it is seen. In a tile that the mask
    // cuts it spreads to all rows, as 0 * NaN.
    bool exact = true;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = warp_row + lane / 4 + half * 8;
        const float m = rows.m[half], l = quad_sum(rows.l[half]);
        const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
        #pragma unroll
        for (int j = 0; j < O_COUNT / 4; ++j)
            #pragma unroll
            for (int x = 0; x < 2; ++x) {
                float& o = acc[j * 4 + half * 2 + x];
                o *= inverse;
                if (cut) exact &= fabsf(o) < infinity();
            }
        const float subtracted = reference(m, c);
        exact &= l < infinity() && fabsf(subtracted) < 0x1p24f;
        if (lse != nullptr && lane % 4 == 0 && tile_start + row < shape.seqlen_q) {
            const float scale = fabsf(static_cast<float>(arguments.scale));
            const float rest = l == 0.0f ? 0.0f : fmaf(m, c, -subtracted) * LN_2;
            lse[row] = l == 0.0f ? -infinity() : m * scale + (logf(l) - rest);
        }
    }

    const u32 chunk_of_lane = out_tile + tile_offset<BLOCK_Q>(warp_row + lane % 16, lane / 16 * 8);
    #pragma unroll
    for (int j = 0; j < O_COUNT / 8; ++j) {                 // 16 rows, 16 columns
        const u32 panel = j / 4 * (BLOCK_Q * PANEL_ROW_BYTES);
        stmatrix_x4((chunk_of_lane ^ (j % 4 * 2 * CHUNK_BYTES)) + panel,
                    pack<Element>(acc[j * 8], acc[j * 8 + 1]),
                    pack<Element>(acc[j * 8 + 2], acc[j * 8 + 3]),
                    pack<Element>(acc[j * 8 + 4], acc[j * 8 + 5]),
                    pack<Element>(acc[j * 8 + 6], acc[j * 8 + 7]));
    }
    u32 inexact = __ballot_sync(WHOLE_WARP, !exact);
    if (inexact != 0) {
        __syncwarp();
        for (int i = 0; i < 16; ++i) {
            const int row = warp_row + i;
            if ((inexact >> i % 8 * 4 & 0xF) == 0 || tile_start + row >= shape.seqlen_q) continue;
            exact_row(arguments, where, out_tile, row, c, lse == nullptr ? nullptr : lse + row);
        }
    }
}

__device__ __forceinline__ void compute_all(const ForwardWgmmaArguments& arguments,
                                            SharedPlan& shared) {
    const Shape& shape = arguments.arrays.shape;
    const int group = threadIdx.x / WARPGROUP - 1;
    const int lane = threadIdx.x % 32, group_row = group * 64;
    const int lane_row = (threadIdx.x / 32 - 4) * 16 + lane / 4;
    const float scale = fabsf(static_cast<float>(arguments.arrays.scale));
    const float c = fmaxf(scale * LOG2_E, 1.2e-38f);        // never 0: 0 * inf is NaN
    const Mask<CAUSAL> mask{shape.seqlen_q, shape.seqlen_k};

    const u64 q_rows = descriptor(
        shared_address(&shared.q_then_out) + group_row * PANEL_ROW_BYTES, 0);
    const u64 k_tile = descriptor(shared_address(&shared.k), 0);
    const u64 v_tile = descriptor(shared_address(&shared.v), BLOCK_K * PANEL_ROW_BYTES);
    const u32 q_full = shared_address(&shared.q_full), q_empty = shared_address(&shared.q_empty);
    const u32 k_full = shared_address(&shared.k_full), k_empty = shared_address(&shared.k_empty);
    const u32 v_full = shared_address(&shared.v_full), v_empty = shared_address(&shared.v_empty);

    float s[S_COUNT], acc[O_COUNT], rescale[2];
    bool started = false;                                   // acc holds something
    u32 p[P_COUNT];
    Rows rows = {{-infinity(), -infinity()}, {0.0f, 0.0f}};
    Ring<Q_STAGES> q;
    Ring<KV_STAGES> v, k;                                   // k: one step ahead

    const auto await_turn = [&] {
        barrier_sync(FIRST_TURN + group, TURN_THREADS);
    };
    const auto pass_turn = [&] {
        barrier_arrive(FIRST_TURN + (group + 1) % MATH_WARPGROUPS, TURN_THREADS);
    };
    const auto issue_scores = [&] {
        multiply_transposed<Element, NEGATE_SCORES ? -1 : 1, BLOCK_Q, BLOCK_K, HEAD_DIM>(
            s, advance(q_rows, q.stage * static_cast<int>(sizeof(shared.q_then_out[0]))),
            advance(k_tile, k.stage * static_cast<int>(sizeof(shared.k[0]))));
        wgmma_commit();
    };
    const auto issue_output = [&] {
        multiply<Element, BLOCK_K>(
            acc, p, advance(v_tile, v.stage * static_cast<int>(sizeof(shared.v[0]))), started);
        wgmma_commit();
        started = true;
    };

    // The first S, alone. There are no more blocks than tiles.
    if (group == MATH_WARPGROUPS - 1) pass_turn();
    wait(q_full, 0);
    Work now = shared.work[0];
    wait(k_full, 0);
    await_turn();
    wgmma_fence();
    issue_scores();
    pass_turn();
    wgmma_wait<0>();
    keep_here(s);
    if (lane == 0) mbarrier_arrive(k_empty);
    apply_mask(s, mask, now.where.tile * BLOCK_Q + lane_row, (now.num_visited - 1) * BLOCK_K);
    softmax<true>(s, rows, c, rescale);
    pack_scores(p, s);

    // The place of Q from which the warp's rows are on their way out, -1 if none: it is given back
    // a step later, when they surely have been read.
    int unread = -1;
    const auto release_place = [&] {
        if (unread >= 0 && lane == 0) {
            tma_store_wait_read<0>();
            mbarrier_arrive(q_empty + 8 * unread);
        }
        unread = -1;
    };

    // The tile of queries at a place of Q is done: its rows to shared memory, and from there out.
    const auto finish = [&](int place) {
        const Work of = shared.work[place];
        const TileOfHead where = of.where;
        const u32 out_tile = shared_address(&shared.q_then_out)
                           + place * static_cast<int>(sizeof(shared.q_then_out[0]));
        store(arguments.arrays, where, out_tile, acc, rows, c, of.num_full < of.num_visited);
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
            const int row = lane_row;                       // the warp's first, as lane is 0
            #pragma unroll
            for (int panel = 0; panel < num_panels(HEAD_DIM_V); ++panel)
                tma_store(arguments.out_map, out_tile + (panel * BLOCK_Q + row) * PANEL_ROW_BYTES,
                          panel * PANEL_COLUMNS, where.tile * BLOCK_Q + row, where.head,
                          where.batch);
            tma_store_commit();
        }
        unread = place;
        started = false;
    };

    // One step: S of key tile `tile` of `now`, acc += P V of the one before. P becomes that of
    // `tile`. new_rows: the one before was the last of another query tile, whose Q is at the place
    // `done`.
    const auto step = [&](int tile, auto masked, auto new_rows, int done) {
        k = v;
        k.next();
        wait(k_full + 8 * k.stage, k.parity);
        await_turn();
        keep_here(acc);
        keep_here(s);
        wgmma_fence();
        issue_scores();
        wait(v_full + 8 * v.stage, v.parity);
        wgmma_fence();
        issue_output();
        pass_turn();
        wgmma_wait<1>();
        keep_here(s);
        if (lane == 0) mbarrier_arrive(k_empty + 8 * k.stage);
        if constexpr (new_rows.value) {
            wgmma_wait<0>();
            keep_here(acc);
            if (lane == 0) mbarrier_arrive(v_empty + 8 * v.stage);
            finish(done);
            rows = {{-infinity(), -infinity()}, {0.0f, 0.0f}};
        }
        if (masked.value && tile >= now.num_full)
            apply_mask(s, mask, now.where.tile * BLOCK_Q + lane_row, tile * BLOCK_K);
        softmax<masked.value>(s, rows, c, rescale);
        if constexpr (!new_rows.value) {
            wgmma_wait<0>();
            keep_here(acc);
            if (lane == 0) mbarrier_arrive(v_empty + 8 * v.stage);
            #pragma unroll
            for (int i = 0; i < O_COUNT; ++i) acc[i] *= rescale[i / 2 % 2];
            release_place();
        }
        v = k;
        pack_scores(p, s);
    };

    for (;;) {
        int tile = now.num_visited - 2;
        for (; tile >= now.num_full; --tile) step(tile, Bool<true>{}, Bool<false>{}, -1);
        for (; tile >= 0; --tile) step(tile, Bool<false>{}, Bool<false>{}, -1);
        release_place();
        const int place = q.stage;
        q.next();
        wait(q_full + 8 * q.stage, q.parity);
        now = shared.work[q.stage];
        if (now.where.tile < 0) {
            q.stage = place;
            break;
        }
        step(now.num_visited - 1, Bool<true>{}, Bool<true>{}, place);
    }

    // The last P V, alone.
    wait(v_full + 8 * v.stage, v.parity);
    await_turn();
    keep_here(acc);
    wgmma_fence();
    issue_output();
    pass_turn();
    wgmma_wait<0>();
    keep_here(acc);
    finish(q.stage);
    release_place();                                        // shared memory ends with the block
    if (group == 0) await_turn();                           // takes back the first turn
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward_wgmma(const __grid_constant__ ForwardWgmmaArguments arguments) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Q_STAGES; ++i) {
            mbarrier_init(shared_address(&shared.q_full[i]), 1);
            mbarrier_init(shared_address(&shared.q_empty[i]), MATH_WARPS);
        }
        for (int i = 0; i < KV_STAGES; ++i) {
            mbarrier_init(shared_address(&shared.k_full[i]), 1);
            mbarrier_init(shared_address(&shared.k_empty[i]), MATH_WARPS);
            mbarrier_init(shared_address(&shared.v_full[i]), 1);
            mbarrier_init(shared_address(&shared.v_empty[i]), MATH_WARPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    // 64 K registers: the math warpgroups get what the loading one does not need.
    constexpr int MATH_REGISTERS = MATH_WARPGROUPS == 2 ? 240 : 160;
    constexpr int LOAD_REGISTERS = MATH_WARPGROUPS == 2 ? 24 : 32;
    if (threadIdx.x < WARPGROUP) {
        give_registers<LOAD_REGISTERS>();
        if (threadIdx.x == 0) load_queries(arguments, shared);
        if (threadIdx.x == 32) load_keys(arguments, shared);
    } else {
        take_registers<MATH_REGISTERS>();
        compute_all(arguments, shared);
    }
}
