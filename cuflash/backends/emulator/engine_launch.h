// The launch, read from the folder that runtime.py has written. A part of engine.cpp.
#pragma once

namespace emulator {

int blocks_of_cluster = 1;

namespace {

// An array of the launch, mapped at the address in the argument struct. Array i lies in address
// span i; nothing is mapped between arrays.
struct Array {
    std::string name;
    unsigned char* bytes;
    uint64_t size;
    const unsigned char* mask;          // of each byte: 0 is a gap between strided rows; or null
    bool writable;
};
constexpr uint64_t FIRST_ADDRESS = 0x510000000000, ADDRESS_SPAN = uint64_t{1} << 36;

// The blocks of a cluster run as one block: `threads` and `shared` are those of all of them, one
// block's after the other's. So what orders accesses orders them across blocks too. A block has
// `own_shared` bytes, its neighbour's begin after `block_shared`.
struct Launch {
    int blocks = 0, threads = 0, blocks_per_sm = 1, shared = 0, resident = 0, cluster = 1;
    int block_threads = 0, block_shared = 0, own_shared = 0;
    uint64_t seed = 0;
    bool flush_denormals = false, truncates = false;
    const unsigned char* arguments = nullptr;
    std::vector<Array> arrays;
};
Launch launch;

[[noreturn]] void fail(const char* what) {
    perror(what);
    exit(2);
}

unsigned char* map_file(int file, uint64_t offset, uint64_t bytes, void* address, int protection) {
    const uint64_t skip = offset % 4096;
    void* at = address == nullptr ? nullptr : static_cast<unsigned char*>(address) - skip;
    const int fixed = address == nullptr ? 0 : MAP_FIXED;
    void* start = mmap(at, bytes + skip, protection, MAP_SHARED | fixed, file,
                       static_cast<off_t>(offset - skip));
    if (start == MAP_FAILED) fail("mmap");
    return static_cast<unsigned char*>(start) + skip;
}

void read_launch(const std::string& folder) {
    const int file = open((folder + "/memory.bin").c_str(), O_RDWR);
    if (file < 0) fail("memory.bin");
    std::ifstream text(folder + "/launch.txt");
    if (!text) fail("launch.txt");
    for (std::string line; std::getline(text, line);) {
        std::istringstream words(line);
        std::string item;
        words >> item;
        if (item == "blocks") words >> launch.blocks;
        else if (item == "threads") words >> launch.threads;
        else if (item == "blocks_per_sm") words >> launch.blocks_per_sm;
        else if (item == "shared") words >> launch.shared;
        else if (item == "cluster") words >> launch.cluster;
        else if (item == "seed") words >> launch.seed;
        else if (item == "resident") words >> launch.resident;
        else if (item == "ftz") words >> launch.flush_denormals;
        else if (item == "truncates") words >> launch.truncates;
        else if (item == "arguments") {
            uint64_t offset, size;
            words >> offset >> size;
            launch.arguments = map_file(file, offset, size, nullptr, PROT_READ);
        } else if (item == "array") {
            Array array;
            uint64_t address, offset;
            int64_t mask;
            words >> array.name >> std::hex >> address >> std::dec >> array.size >> offset >> mask
                  >> array.writable;
            const int protection = PROT_READ | (array.writable ? PROT_WRITE : 0);
            array.bytes = map_file(
                file, offset, array.size, reinterpret_cast<void*>(address), protection);
            array.mask = mask < 0 ? nullptr : map_file(file, static_cast<uint64_t>(mask),
                                                       array.size, nullptr, PROT_READ);
            launch.arrays.push_back(array);
        }
    }
    launch.block_threads = launch.threads;
    launch.own_shared = launch.shared;
    // Each block's is aligned to the period of the 128-byte swizzle.
    launch.block_shared =
        launch.cluster > 1 ? (launch.shared + 1023) / 1024 * 1024 : launch.shared;
    launch.threads *= launch.cluster;
    launch.shared = launch.block_shared * launch.cluster;
    blocks_of_cluster = launch.cluster;
    if (launch.shared > MOST_SHARED_BYTES) fail("shared memory");
}

}  // namespace
}  // namespace emulator
