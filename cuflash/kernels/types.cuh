// Element types, and the arguments that a kernel gets from the host (launch.py mirrors these structs
// field by field; tests/test_launch.py holds the two together). Strides count elements.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// 16-bit floating-point numbers as they stand in memory. Arithmetic happens in float: ptx.cuh converts.
struct alignas(2) float16 { u16 bits; };
struct alignas(2) bfloat16 { u16 bits; };

// The type in which scores, sums and lse of an Element are held.
template <typename Element> struct AccumulatorOf { using type = float; };
template <> struct AccumulatorOf<double> { using type = double; };
template <typename Element> using Accumulator = typename AccumulatorOf<Element>::type;

// (batch, token, head) strides of an array (batch, seqlen, heads, head_dim); the last axis has stride 1.
struct Strides { i64 batch, token, head; };

struct Shape { int batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim, head_dim_v; };

// How many heads (of all batches) walk their tiles side by side, so that what they share fits L2: scheduler.cuh.
struct Schedule { int heads_per_section; };

// lse and delta are contiguous (batch, num_heads_q, seqlen_q) arrays of Accumulator<Element>.
struct ForwardArguments {
    const void* q; const void* k; const void* v;
    void* out;
    void* lse;                                  // null: not wanted
    Strides q_stride, k_stride, v_stride, out_stride;
    Shape shape;
    Schedule schedule;
    double scale;
};

struct BackwardArguments {
    const void* dout; const void* q; const void* k; const void* v; const void* out;
    const void* lse;
    void* delta;                                // rowsum(dO * O), written by backward_delta.cu
    void* dq_sum;                               // float32 sums of dq in the order of the main kernel's fragments
    void* turns;                                // deterministic dq: int32, how many key tiles a query tile has had
    void* dq; void* dk; void* dv;
    Strides dout_stride, q_stride, k_stride, v_stride, out_stride, dq_stride, dk_stride, dv_stride;
    Shape shape;
    Schedule schedule;
    double scale;
};

// out = merge of two partial results of num_rows = batch * seqlen_q * num_heads_q rows each. All arrays contiguous:
// out (batch, seqlen_q, num_heads_q, head_dim_v), lse (batch, num_heads_q, seqlen_q).
struct MergeArguments {
    const void* out_a; const void* lse_a; const void* out_b; const void* lse_b;
    void* out; void* lse;
    int batch, seqlen_q, num_heads_q, head_dim_v;
};

// A compile-time truth as a function argument: `if constexpr (masked.value)`.
template <bool VALUE> struct Bool { static constexpr bool value = VALUE; };
