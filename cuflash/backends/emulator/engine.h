// The engine's interface for the built-ins (cuda_host.h) and instructions (ptx_host.h). Every CUDA
// thread is a fiber. It runs until it must wait for others; engine.cpp then chooses the next warp
// from the seed.
#pragma once
#include <stdint.h>

namespace emulator {

// The location of an operation in the kernel's text. The built-in functions take it as their last
// parameters, which default to the caller's file and line.
struct Site {
    const char* file;
    int line;
    bool operator==(const Site& other) const {
        // Files are distinguished by address: all sites are those of one translation unit.
        return line == other.line && file == other.file;
    }
};
#define EMULATOR_SITE const char* file = __builtin_FILE(), int line = __builtin_LINE()

constexpr uint32_t WHOLE_WARP = 0xFFFFFFFFu;

// Ends the process: the running thread did what `format` says, at `site`.
[[noreturn]] void fault(Site site, const char* format, ...);

// The calling lane waits until all lanes of `mask` have reached this operation. The last one runs
// `meaning` with the operands of all lanes, null for lanes outside the mask.
using Meaning = void (*)(void* const (&lanes)[32]);
void meet(const char* operation, uint32_t mask, void* operands, Meaning meaning, Site site);

// As meet; afterwards all memory operations of these lanes are ordered.
void meet_and_order(uint32_t mask, Site site);

// The calling thread waits until all threads of the block have arrived. Returns whether any
// predicate was true.
bool wait_for_block(const char* operation, bool predicate, Site site);

// The same of all threads of the cluster.
bool wait_for_all(const char* operation, bool predicate, Site site);
// Of the calling thread's block. Shared memory has the memory of all blocks, one after another.
int rank_in_cluster();
uint32_t first_byte_of_block();
// A shared address has the block's rank above bit 24, as on an H200. `offset`: from shared_bytes.
extern int blocks_of_cluster;
uint32_t address_in_cluster(int64_t offset);
// What stands at `address`, in the shared memory of another block.
uint32_t shared_of_rank(uint32_t address, int rank);

// Lets other threads run, other blocks' too: for loops that wait for another value in global
// memory.
void give_way(const int* value, Site site);
// Called when a value that such loops wait for may have changed.
void progress();

// Shared memory, by its address there. READ_BY_WARP: the lane gives the address, all lanes read.
// READ_BY_WGMMA: a wgmma of the warpgroup reads it.
enum class Access { READ, WRITE, READ_BY_WARP, READ_BY_WGMMA };
void* shared_memory(uint32_t address, int bytes, int alignment, Access access, Site site);
// Global memory.
void check_global(const void* address, int bytes, int alignment, Access access, Site site);

// A copy global to shared of which the first `read` bytes are read and the others zero. It lands
// at the thread's wait for its group; until then no thread may access the target.
void copy_later(uint32_t target, const void* source, int bytes, int read, Site site);
void copy_now(uint32_t target, const void* source, int bytes, int read, Site site);
void commit_copies();
void wait_for_copies(int pending);

// ---- Hopper: what the instructions of the same names in ptx.cuh do ----

// A TensorMap, as machine.py encodes it in the 128 bytes that are opaque on a GPU.
struct TensorMap {
    unsigned char* address;
    uint64_t sizes[4];                                      // elements, the fastest axis first
    uint64_t strides[3];                                    // bytes, of axes 1 to 3
    uint32_t box[4];
    uint64_t reserved[6];
};

void mbarrier_init(uint32_t barrier, int arrivals, Site site);
void fence_mbarrier_init();
void mbarrier_arrive(uint32_t barrier, int bytes, Site site);
bool mbarrier_try_wait(uint32_t barrier, uint32_t parity, Site site);
void named_barrier(int id, int threads, bool wait, Site site);
void set_registers(int count, bool more, Site site);
void fence_async_proxy();
void load_box(uint32_t target, const void* map, uint32_t barrier, const int (&at)[4], Site site);
// To the same address in each block of the cluster whose bit is set.
void load_box_of_blocks(uint32_t target, const void* map, uint32_t barrier, uint32_t blocks,
                        const int (&at)[4], Site site);
// From shared memory to another block's.
void copy_shared(uint32_t target, uint32_t source, uint32_t barrier, int bytes, Site site);
void store_box(const void* map, uint32_t source, const int (&at)[4], Site site);
void load_bytes(uint32_t target, const void* source, uint32_t barrier, int bytes, Site site);
void store_bytes(void* target, uint32_t source, int bytes, Site site);
void add_floats(float* target, uint32_t source, int bytes, Site site);
void add_ints(int* target, uint32_t source, int bytes, Site site);
void commit_stores();
void read_stores(int pending);
void write_stores(int pending);
void fence_wgmmas(Site site);
void commit_wgmmas(Site site);
void wait_for_wgmmas(int pending, Site site);

// A lane's part in a wgmma: `count` registers of D, A by descriptor or its four registers.
struct WgmmaOperands {
    float* d;
    int count;
    uint64_t a, b;
    const uint32_t* a_registers;
    bool accumulate, a_columns_contiguous, b_rows_contiguous;
    int sign;
    float (*to_float)(uint16_t);
};
void start_wgmma(WgmmaOperands& operands, Site site);

// ---- What the lanes of a warp do together ----

// Each lane gets `bytes` bytes at its partner's `value`; a partner outside the mask has none.
void shuffle(const char* operation, uint32_t mask, const void* value, void* result, int bytes,
             int partner, Site site);
uint32_t ballot(uint32_t mask, bool predicate, Site site);
void ldmatrix(uint32_t (&r)[4], uint32_t address, bool transposed, Site site);
uint32_t movmatrix(uint32_t pair, Site site);
void stmatrix(uint32_t address, const uint32_t (&r)[4], Site site);
// `halves`: two MMAs of 8 products, the first 8 first, as below sm_80.
void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool bfloat16,
                 bool halves, Site site);
void mma_16x8x8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site site);

// ---- Numbers of 16 bits ----

float value_of_16_bits(uint16_t bits, bool bfloat16);
// x rounded to nearest even.
uint32_t float16_bits(float x);
uint32_t bfloat16_bits(float x);

}  // namespace emulator

// Of the running thread.
struct uint3 { unsigned x, y, z; };
extern uint3 threadIdx, blockIdx, blockDim, gridDim;
// The running block's shared memory, under the name that kernels declare.
extern unsigned char shared_bytes[];
