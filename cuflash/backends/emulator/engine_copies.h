// Addresses of shared and global memory, and cp.async copies. A part of engine.cpp.
#pragma once

namespace emulator {

void* shared_memory(uint32_t address, int bytes, int alignment, Access access, Site site) {
    const auto where = [&] { return here(site); };
    check_alignment(address, alignment, where);
    check_shared(address, bytes, access, where);
    return shared_bytes + address;
}

void check_global(const void* address, int bytes, int alignment, Access access, Site site) {
    const auto where = [&] { return here(site); };
    const auto number = reinterpret_cast<uint64_t>(address);
    check_alignment(number, alignment, where);
    check_array(number, bytes, access, where);
}

void copy_later(uint32_t target, const void* source, int bytes, int read, Site site) {
    if (read < 0 || read > bytes) fault(site, "cp.async reads %d of %d bytes", read, bytes);
    check_alignment(reinterpret_cast<uint64_t>(source), bytes, [&] { return here(site); });
    if (read > 0) check_global(source, read, 1, Access::READ, site);
    memset(shared_memory(target, bytes, bytes, Access::WRITE, site), 0xFF,
           static_cast<size_t>(bytes));
    for (uint32_t i = target / GRANULE; i < (target + bytes) / GRANULE; ++i)
        block->granules[i].landing = static_cast<uint16_t>(thread->index + 1);
    thread->copies.push_back({target, static_cast<const unsigned char*>(source), bytes, read});
}

void commit_copies() {
    thread->groups.push_back(std::move(thread->copies));
    thread->copies.clear();
}

void wait_for_copies(int pending) {
    while (static_cast<int>(thread->groups.size()) > pending) {
        for (const Copy& copy : thread->groups.front()) {
            memset(shared_bytes + copy.target, 0, static_cast<size_t>(copy.bytes));
            memcpy(shared_bytes + copy.target, copy.source, static_cast<size_t>(copy.read));
            const uint32_t end = (copy.target + copy.bytes) / GRANULE;
            for (uint32_t i = copy.target / GRANULE; i < end; ++i) {
                block->granules[i].landing = 0;
                note_write(block->granules[i]);
            }
        }
        thread->groups.erase(thread->groups.begin());
    }
}

void multiply_add(float (&d)[16][8], const float (&a)[16][16], const float (&b)[16][8]) {
    for (int row = 0; row < 16; ++row) {
        double sum[8];
        for (int column = 0; column < 8; ++column) sum[column] = d[row][column];
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 8; ++column)
                sum[column] += static_cast<double>(a[row][k]) * b[k][column];
        for (int column = 0; column < 8; ++column)
            d[row][column] = static_cast<float>(sum[column]);
    }
}

}  // namespace emulator
