// Runs one launch of one kernel on a CPU: `<engine> <image> <folder>`, or `<program> <folder>`
// where the kernel is linked with the engine. runtime.py has written the launch (launch.txt) and
// all memory that the kernel may access (memory.bin) to the folder. The exit status is 0, or 70
// with a message if a thread performed an illegal operation.
//
// The compiler inserts calls to __tsan_read4 and the like before every memory access of the kernel
// that is not provably private to a thread: engine_hooks.h implements them as checks.
#include "engine.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <elf.h>
#include <fcntl.h>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <signal.h>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <unwind.h>
#include <vector>

uint3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int MOST_SHARED_BYTES = 512 << 10;             // of a cluster
// Shared memory, far from the program's own data.
constexpr int NEAR_SHARED_BYTES = 64 << 10;
extern "C" {
alignas(1024) unsigned char emulator_shared[NEAR_SHARED_BYTES + MOST_SHARED_BYTES];
}
asm(".globl shared_bytes\n.set shared_bytes, emulator_shared + 65536");

// The kernel: of this program, or of the image that load_image loads.
extern "C" [[gnu::weak]] void emulator_entry(const void* argument);
static void (*entry)(const void* argument) = emulator_entry;

#include "engine_launch.h"
#include "engine_image.h"
#include "engine_state.h"
#include "engine_fibers.h"
#include "engine_faults.h"
#include "engine_memory.h"
#include "engine_scheduler.h"
#include "engine_waiting.h"
#include "engine_copies.h"
#include "engine_numbers.h"
#include "engine_warps.h"
#include "engine_hopper.h"
#include "engine_hooks.h"

int main(int count, char** arguments) {
    if (count != (entry == nullptr ? 3 : 2)) {
        fprintf(stderr, "usage: %s%s folder\n", arguments[0], entry == nullptr ? " image" : "");
        return 2;
    }
    emulator::read_launch(arguments[count - 1]);
    if (entry == nullptr) emulator::load_image(arguments[1]);
    emulator::catch_signals();
    emulator::random_bits.seed(emulator::launch.seed);
    blockDim = {static_cast<unsigned>(emulator::launch.block_threads), 1, 1};
    gridDim = {static_cast<unsigned>(emulator::launch.blocks), 1, 1};
    emulator::run_all();
    return 0;
}
