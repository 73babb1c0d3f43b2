// The state of threads, warps, blocks and of each byte of shared memory. A part of engine.cpp.
#pragma once

namespace emulator {
namespace {

constexpr int LANES = 32;

// The location of an instruction whose fault shows later: its site and its return address.
struct Origin { Site site; const void* caller; };

struct Copy { uint32_t target; const unsigned char* source; int bytes, read; };

// Bulk copies in flight, to shared memory and from it: a box of a tensor or, without a map,
// contiguous bytes. The map is copied, because the kernel's own may be gone (its thread has ended)
// before the copy lands.
struct BulkLoad {
    uint32_t target;
    std::optional<TensorMap> map;
    int at[4];
    int thread;
    Origin origin;
    const unsigned char* source;
    int bytes;
};
enum class Arrives { COPIED, ADDED_FLOATS, ADDED_INTS };    // what becomes of contiguous bytes
struct BulkStore {
    uint32_t source;
    std::optional<TensorMap> map;
    int at[4];
    Origin origin;
    bool read = false;
    std::vector<unsigned char> bytes;                       // read, but not written yet
    unsigned char* target = nullptr;                        // without a map: of `count` bytes
    int count = 0;
    Arrives arrives = Arrives::COPIED;                      // without a map
};

enum class State { READY, WAITS, ENDED };

// What a thread waits for, in addition to the operation: an mbarrier (its address in shared
// memory), a named barrier (its number) or another value (its address in global memory).
enum class Awaited { THREADS, MBARRIER, NAMED_BARRIER, VALUE };

struct Thread {
    int index = 0;
    void* stack_pointer = nullptr;
    unsigned char* stack = nullptr;                         // its lowest address
    State state = State::READY;
    const char* operation = "";                             // in which it waits
    Site site = {"", 0};
    Awaited awaited = Awaited::THREADS;
    uint64_t awaited_at = 0;
    std::string trace;                                      // for a report: see engine_faults.h
    std::vector<Copy> copies;                               // not committed yet
    std::vector<std::vector<Copy>> groups;                  // committed, oldest first
    uint16_t proxy_fences = 0;
    Origin wgmma = {};                                      // the wgmma that it issues
    std::vector<BulkStore> stores;                          // not committed yet
    std::vector<std::vector<BulkStore>> store_groups;
};

// Lanes of a warp that have arrived at an operation and wait for the other lanes of its mask.
struct Meeting {
    const char* operation;
    uint32_t mask, arrived;
    Site site;
    void* operands[LANES];
};

// The accumulator of a wgmma in flight: its true values, and the registers that hold it.
struct Accumulator {
    static inline int in_flight = 0;                        // of all warps
    std::vector<float> values;                              // [lane][count]
    float* registers[LANES];
    int count = 0, pending = 0;
    Accumulator() { ++in_flight; }
    Accumulator(const Accumulator&) = delete;
    Accumulator& operator=(const Accumulator&) = delete;
    ~Accumulator() { --in_flight; }
};

// A warp's part of a wgmma: 16 rows of A, all of B.
struct Wgmma {
    std::shared_ptr<Accumulator> d;
    uint64_t a, b;                                          // descriptors
    const uint32_t* a_registers[LANES];                     // null: a
    bool accumulate, a_columns_contiguous, b_rows_contiguous;
    int sign;
    float (*to_float)(uint16_t);
    Origin origin;
};

struct Warp {
    uint32_t ready = 0;                                     // one bit per lane
    bool yields = false;                                    // to all other ready warps
    std::vector<Meeting> meetings;
    std::vector<Wgmma> wgmmas;                              // not committed yet
    std::vector<std::vector<Wgmma>> wgmma_groups;
    std::vector<std::shared_ptr<Accumulator>> accumulators; // of both
    bool fenced = false;                                    // since the last wait
    int registers = 0;                                      // per thread
};

// An mbarrier. `published`: the epochs published by arrivals in this phase. `acquired`: those of
// the previous phase, which its waits acquire.
struct Mbarrier {
    int expected, missing;                                  // arrivals
    int64_t bytes = 0;                                      // expected, but not copied yet
    uint32_t phase = 0;
    bool fenced = false;
    std::vector<BulkLoad> loads;
    std::vector<uint32_t> published, acquired;
    std::vector<int> waiting;
};

// One of barriers 1 to 15.
struct NamedBarrier {
    int arrived = 0, threads = 0;
    Origin origin = {};                                     // of the last arrival
    std::vector<uint32_t> published;
    std::vector<int> waiting;
};

// The last writer and readers of two bytes of shared memory. A warp's epoch ends when the warp
// publishes it at a barrier. A write is ordered before an access of another warp if that warp has
// acquired the writer's epoch. It is ordered before an access of another lane of the same warp if
// the lanes have synchronised since; `syncs` counts that.
constexpr int GRANULE = 2;
struct Granule {
    uint32_t written_in = 0;                                // Block::run, 0: never
    uint32_t write_epoch = 0, write_syncs = 0;
    uint16_t writer = 0;
    uint16_t landing = 0;                                   // 1 + thread whose copy is in flight
    uint16_t leaving = 0;                                   // 1 + thread whose bulk store reads it
    uint16_t unfenced = 0;                                  // 1 + writer's fences, 0: none needed
};
// A warp's last read. One word, loaded and stored whole: a load of a word that was just stored in
// parts has to wait for them.
struct Read {
    static constexpr uint64_t COUNTS = (1 << 28) - 1;
    uint64_t bits = 0;                                      // epoch, syncs, lane: 28, 28, 8 bits
    Read() = default;
    Read(uint64_t epoch, uint64_t syncs, uint64_t lane)
        : bits((epoch & COUNTS) | (syncs & COUNTS) << 28 | lane << 56) {}
    uint32_t epoch() const { return bits & COUNTS; }        // 0: none
    uint32_t syncs() const { return bits >> 28 & COUNTS; }
    uint32_t lane() const { return bits >> 56; }            // SEVERAL if more than one
};
constexpr uint32_t SEVERAL = 255;

// Zeros: calloc does not touch them, and a small launch uses few of their pages.
template <class T> struct Zeros {
    T* first = nullptr;
    size_t count = 0;
    void resize(size_t size) {
        first = static_cast<T*>(calloc(size, sizeof(T)));
        count = size;
        if (first == nullptr) fail("calloc");
    }
    T& operator[](size_t i) { return first[i]; }
    T* begin() { return first; }
    T* end() { return first + count; }
};

// A resident block, or a cluster of them. Its shared memory is in shared_bytes while it runs,
// otherwise in `shared`.
struct Block {
    int index = -1;
    uint32_t run = 0;                                       // counts blocks of all launches
    int living = 0, ready = 0;                              // threads
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<unsigned char> shared;
    Zeros<Granule> granules;
    Zeros<Read> reads;                                      // [warp * granules.count + granule]
    std::vector<uint32_t> epoch, syncs;                     // of each warp
    std::vector<uint32_t> acquired;                         // [warp * num_warps + other]
    int at_barrier = 0;
    bool predicate = false, outcome = false;               // so far; of the last barrier
    const char* barrier = "";
    Site barrier_site = {"", 0};
    Origin registers = {};                                  // the last setmaxnreg.inc
    std::map<uint32_t, Mbarrier> mbarriers;                 // by address
    NamedBarrier named_barriers[16];
    int num_warps() const { return static_cast<int>(warps.size()); }
    Read* reads_of(int warp) { return &reads[warp * granules.count]; }
};

// The number in the grid of a thread's block.
int block_of(const Block& b, int thread) {
    return b.index * launch.cluster + thread / launch.block_threads;
}

std::vector<std::unique_ptr<Block>> resident;
Block* block = nullptr;                                     // running, with `thread`
Thread* thread = nullptr;
bool block_may_change = false;                              // at the next choice
bool in_engine = true;                                      // accesses are not checked
bool reporting = false;                                     // threads run only for report_trace
void* scheduler_stack = nullptr;
std::mt19937_64 random_bits;
uint64_t idle_turns = 0;                                    // consecutive spins of waiting loops

int draw(int below) { return static_cast<int>(random_bits() % static_cast<uint64_t>(below)); }

}  // namespace
}  // namespace emulator
