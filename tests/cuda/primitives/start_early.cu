// griddepcontrol: each kernel after the first may start early, and adds one to what the kernel
// before it left.
#include "common/ptx.cuh"

struct Arguments { u32* counts; };

extern "C" __global__ void start_early(const __grid_constant__ Arguments all) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    all.counts[threadIdx.x] += 1;
}
