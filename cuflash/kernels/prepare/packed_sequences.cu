// Checks the offsets of packed sequences before kernels use them (packed_sequences.cuh): whether
// one is bad, and which sequences have the most queries and the most keys. Also zeroes the dynamic
// scheduler's counter.
//
// Offsets begin at 0, do not decrease and do not pass the number of tokens; no sequence is longer
// than the call says.
//
// Grid: one block. Block: NUM_THREADS threads.
// Constants: Arguments, Element, PACKED, NUM_THREADS. Shared memory: two Longest a thread.
//
// Bound by memory: 8 bytes a sequence, with the bandwidth of one SM.
#include "common/packed_sequences.cuh"

struct Longest { int length, number; };

inline Longest longer(Longest a, Longest b) {
    return b.length > a.length || (b.length == a.length && b.number < a.number) ? b : a;
}

// Checks offset i and sequence i - 1, which ends there.
inline void check(const Offsets& offsets, int i, int most, Longest& longest, bool& bad) {
    const i64 offset = offsets.at(i), before = i == 0 ? 0 : offsets.at(i - 1);
    if (offset < before || offset > offsets.total || offset - before > most
        || (i == 0 && offset != 0)) bad = true;
    else if (i > 0) longest = longer(longest, {static_cast<int>(offset - before), i - 1});
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
sequences(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Longest (&longest)[2][NUM_THREADS] =
        *reinterpret_cast<Longest (*)[2][NUM_THREADS]>(shared_bytes);
    const Offsets q_offsets = query_offsets(args), k_offsets = key_offsets(args);
    const int thread = threadIdx.x;
    Longest q = {0, 0}, k = {0, 0};
    bool bad = false;
    for (int i = thread; i <= args.options.num_sequences; i += NUM_THREADS) {
        check(q_offsets, i, args.options.max_seqlen_q, q, bad);
        check(k_offsets, i, args.options.max_seqlen_k, k, bad);
    }
    longest[0][thread] = q;
    longest[1][thread] = k;
    bad = __syncthreads_or(bad);
    for (int half = NUM_THREADS / 2; half > 0; half /= 2) {
        if (thread < half)
            for (auto& of_threads : longest)
                of_threads[thread] = longer(of_threads[thread], of_threads[thread + half]);
        __syncthreads();
    }
    if (thread == 0) {
        *args.sequence_stats = {bad, longest[0][0].number, longest[1][0].number};
        clear_tile_counter(args);
    }
}
