// barrier_sync and barrier_arrive: pairs of warps exchange their words, one per thread. The first
// of a pair arrives and the second waits, then both wait. 128 threads. Shared memory: 512 bytes.
#include "common/ptx.cuh"

struct Arguments { const u32* x; u32* y; };

extern "C" __global__ void meet_in_pairs(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    u32* words = reinterpret_cast<u32*>(shared_bytes);
    const int thread = threadIdx.x, partner = thread ^ 32, pair = thread / 64;
    const bool first = thread % 64 < 32;
    if (first) {
        words[thread] = a.x[thread];
        barrier_arrive(1 + pair, 64);
    } else {
        barrier_sync(1 + pair, 64);
        a.y[thread] = words[partner];
        words[thread] = a.x[thread];
    }
    barrier_sync(3 + pair, 64);
    if (first) a.y[thread] = words[partner];
    if (first) barrier_arrive(5 + pair, 64);                // goes on: the others come there later
    barrier_sync(7 + pair, 64);
    if (!first) barrier_sync(5 + pair, 64);
}
