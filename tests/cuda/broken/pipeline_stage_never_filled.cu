// On sm_90a: a consumer waits for a stage that its producer does not fill.
#include "sm90/pipeline.cuh"

struct Arguments { const float* x; float* out; };

struct Tiles { float tiles[2][32]; };
struct SharedPlan : Tiles { u64 full[2]; };

constexpr int STAGE_READ = 1;                               // of stage s: STAGE_READ + s

__device__ __forceinline__ void read(SharedPlan& shared, int stage, float* out) {
    mbarrier_wait(shared_address(&shared.full[stage]), 0);           // caught here
    out[stage * 32 + threadIdx.x % 32] = shared.tiles[stage][threadIdx.x % 32];
}

extern "C" __global__ void pipeline_stage_never_filled(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0)
        for (u64& barrier : shared.full) mbarrier_init(shared_address(&barrier), 32);
    __syncthreads();
    for (int stage = 0; stage < 2; ++stage) {
        if (threadIdx.x < 32) {
            shared.tiles[stage][lane] = a.x[stage * 32 + lane];
            if (!BROKEN || stage == 0) mbarrier_arrive(shared_address(&shared.full[stage]));
        } else {
            read(shared, stage, a.out);                     // caught here
        }
        barrier_sync(STAGE_READ + stage, 64);               // caught here
    }
}
