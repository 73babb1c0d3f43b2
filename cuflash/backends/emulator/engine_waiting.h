// Waiting: warp-level operations, block barriers, spinning loops. A part of engine.cpp.
#pragma once

namespace emulator {

void fault(Site site, const char* format, ...) {
    char message[400];
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    fault_at(here(site), message);
}

namespace {

[[noreturn]] void fault(const Origin& origin, const char* format, ...) {
    char message[400];
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    fault_at(here(origin), message);
}

}  // namespace

void meet(const char* operation, uint32_t mask, void* operands, Meaning meaning, Site site) {
    const int lane = thread->index % LANES;
    if ((mask >> lane & 1) == 0)
        fault(site, "%s with mask %#x, which lacks its own lane", operation, mask);
    auto& meetings = block->warps[thread->index / LANES].meetings;
    size_t i = 0;
    while (i < meetings.size()
           && !(meetings[i].operation == operation && meetings[i].mask == mask
                && meetings[i].site == site)) ++i;
    if (i == meetings.size()) meetings.push_back({operation, mask, 0, site, {}});
    meetings[i].arrived |= 1u << lane;
    meetings[i].operands[lane] = operands;
    if (meetings[i].arrived != mask) {
        wait_in(operation, site);
        return;
    }
    in_engine = true;
    if (meaning != nullptr) meaning(meetings[i].operands);
    meetings.erase(meetings.begin() + static_cast<std::ptrdiff_t>(i));
    idle_turns = 0;
    const int first = thread->index - lane;
    for (int other = 0; other < LANES; ++other)
        if (mask >> other & 1 && other != lane) make_ready(block->threads[first + other]);
    in_engine = false;
}

void meet_and_order(uint32_t mask, Site site) {
    meet("__syncwarp", mask, nullptr, [](void* const (&)[32]) {
        ++block->syncs[thread->index / LANES];
    }, site);
}

bool wait_for_block(const char* operation, bool predicate, Site site) {
    if (launch.cluster > 1) fault(site, "%s of a cluster's block is not modelled", operation);
    return wait_for_all(operation, predicate, site);
}

bool wait_for_all(const char* operation, bool predicate, Site site) {
    Block& b = *block;
    if (b.at_barrier == 0) {
        b.predicate = false;
        b.barrier = operation;
        b.barrier_site = site;
    } else if (!(b.barrier_site == site)) {
        fault(site, "waits in %s while other threads of the block wait in %s at %s", operation,
              b.barrier, text(b.barrier_site).c_str());
    }
    b.predicate |= predicate;
    if (++b.at_barrier < launch.threads) {
        wait_in(operation, site);
        return b.outcome;       // not b.predicate: other threads may be at the next barrier already
    }
    in_engine = true;
    b.at_barrier = 0;
    b.outcome = b.predicate;
    idle_turns = 0;
    order_block();
    for (Thread& t : b.threads) make_ready(t);
    block_may_change = draw(4) == 0;
    // The last thread to arrive waits to be scheduled like the others.
    make_ready((thread->state = State::WAITS, *thread));
    leave();
    return b.outcome;
}

void give_way(const int* value, Site site) {
    note_wait("a loop", site, Awaited::VALUE, reinterpret_cast<uint64_t>(value));
    // An iteration of a spinning loop changes nothing. If all threads only spin for long, the
    // awaited value will never come.
    if (++idle_turns > 1000u * resident.size() * launch.threads) report_standstill();
    in_engine = true;
    make_ready(*thread);
    block->warps[thread->index / LANES].yields = true;
    block_may_change = true;
    leave();
}

void progress() {
    idle_turns = 0;
    block_may_change = true;
}

}  // namespace emulator
