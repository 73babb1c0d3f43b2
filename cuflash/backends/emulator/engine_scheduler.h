// The scheduler: which warp runs next, and which blocks are resident. A part of engine.cpp.
#pragma once

namespace emulator {
namespace {

// Registers per thread of kernels that use setmaxnreg: as many as let blocks_per_sm blocks be
// resident (__launch_bounds__(threads, blocks_per_sm)).
int registers_at_start() {
    constexpr int OF_MULTIPROCESSOR = 64 << 10, UNIT = 8, MOST = 248;
    const int num_warps = (launch.block_threads + LANES - 1) / LANES;
    const int threads = launch.blocks_per_sm * num_warps * LANES;
    return std::min(OF_MULTIPROCESSOR / threads / UNIT * UNIT, MOST);
}

void start_block(Block& b, int index) {
    static uint32_t runs = 0;
    const int num_warps = (launch.threads + LANES - 1) / LANES;
    b.index = index;
    b.run = ++runs;
    b.living = b.ready = launch.threads;
    b.at_barrier = 0;
    b.predicate = false;
    b.warps.assign(num_warps, {});
    for (Warp& warp : b.warps) warp.registers = registers_at_start();
    b.mbarriers.clear();
    for (NamedBarrier& barrier : b.named_barriers) barrier = {};
    if (b.threads.empty()) {
        b.threads.resize(launch.threads);
        b.granules.resize(launch.shared / GRANULE + 1);
        b.reads.resize(num_warps * b.granules.count);
        b.epoch.assign(num_warps, 1);
        b.syncs.assign(num_warps, 1);
        b.acquired.assign(num_warps * num_warps, 0);
        // A guard below each warp's stacks, not below each stack: most of a small launch's time
        // would be mprotect. leave() looks for an overflow into a neighbour's.
        constexpr size_t OF_WARP = GUARD_BYTES + LANES * STACK_BYTES;
        void* stacks = mmap(nullptr, OF_WARP * num_warps, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED) fail("mmap of stacks");
        for (int w = 0; w < num_warps; ++w)
            mprotect(static_cast<unsigned char*>(stacks) + OF_WARP * w, GUARD_BYTES, PROT_NONE);
        for (int i = 0; i < launch.threads; ++i)
            b.threads[i].stack = static_cast<unsigned char*>(stacks) + OF_WARP * (i / LANES)
                               + GUARD_BYTES + STACK_BYTES * (i % LANES);
    } else {                                                // reset the previous block's state
        for (auto& g : b.granules) g.landing = g.leaving = 0;
        Block* running = block;
        block = &b;
        order_block();
        block = running;
    }
    b.shared.assign(launch.shared, 0xFF);                   // NaN, should a check let it through
    for (int i = 0; i < launch.threads; ++i) {
        Thread& t = b.threads[i];
        t.index = i;
        t.state = State::READY;
        t.operation = "";
        t.copies.clear();
        t.groups.clear();
        t.stores.clear();
        t.store_groups.clear();
        t.proxy_fences = 0;
        prepare_stack(t);
        b.warps[i / LANES].ready |= 1u << i % LANES;
    }
}

void switch_block(Block* to) {
    if (block == to) return;
    if (block != nullptr) memcpy(block->shared.data(), shared_bytes, launch.shared);
    block = to;
    memcpy(shared_bytes, block->shared.data(), launch.shared);
}

// Runs the ready lanes of a warp, in random order, until each waits or has ended.
void run_warp(int w) {
    const int first = draw(LANES), step = draw(2) == 0 ? 1 : LANES - 1;
    chosen = {w, first, step, 0, block->warps[w].ready};
    if (void* stack = enter_next_lane()) emulator_switch(&scheduler_stack, stack);
}

// Policies for choosing a warp: any ready one; the same one while it is ready; or the first ready
// one in a fixed random order.
enum class Order { ANY, SAME, RANKED };

void run_all() {
    const int most = launch.resident > 0 ? launch.resident : 1 + draw(4);
    const Order order = static_cast<Order>(draw(3));
    // CUDA promises no order in which blocks start.
    std::vector<int> waiting(launch.blocks / launch.cluster);
    std::iota(waiting.begin(), waiting.end(), 0);
    std::shuffle(waiting.begin(), waiting.end(), random_bits);
    const auto start_next = [&](Block& b) {
        start_block(b, waiting.back());
        waiting.pop_back();
    };
    while (static_cast<int>(resident.size()) < most && !waiting.empty()) {
        resident.push_back(std::make_unique<Block>());
        start_next(*resident.back());
    }
    if (resident.empty()) return;
    const int num_warps = resident[0]->num_warps();
    std::vector<int> ranks(num_warps);
    for (int i = 0; i < num_warps; ++i) ranks[i] = i;
    std::shuffle(ranks.begin(), ranks.end(), random_bits);
    int warp = 0;
    switch_block(resident[0].get());
    for (;;) {
        if (block->living == 0 && !waiting.empty()) {
            Block* ended = block;
            block = nullptr;
            start_next(*ended);
            switch_block(ended);
        }
        if (block->ready == 0 || block_may_change) {
            block_may_change = false;
            std::vector<Block*> able;
            for (const auto& b : resident)
                if (b->ready > 0) able.push_back(b.get());
            if (able.empty()) break;
            switch_block(able[draw(static_cast<int>(able.size()))]);
        }
        // Under every policy, a warp that yielded runs after all other ready warps. On a GPU every
        // warp makes progress, and a spinning loop may wait for the block's other warps.
        const auto comes_first = [](const Warp& w) { return w.ready != 0 && !w.yields; };
        if (std::none_of(block->warps.begin(), block->warps.end(), comes_first))
            for (Warp& w : block->warps) w.yields = false;
        const auto ready = [&](int w) { return comes_first(block->warps[w]); };
        if (order == Order::RANKED)
            for (warp = 0; !ready(ranks[warp]);) ++warp;
        else if (order == Order::ANY || !ready(warp))
            for (warp = draw(num_warps); !ready(warp);) warp = (warp + 1) % num_warps;
        run_warp(order == Order::RANKED ? ranks[warp] : warp);
    }
    for (const auto& b : resident)
        if (b->living > 0) report_standstill();
}

void handle_signal(int number, siginfo_t* info, void*) {
    char message[200];
    const int length = snprintf(
        message, sizeof message, "block %d, thread %d: signal %d at address %p (a stack overflow, "
        "or an access that no check saw)\n",
        block == nullptr ? -1 : block_of(*block, thread == nullptr ? 0 : thread->index),
        thread == nullptr ? -1 : thread->index % launch.block_threads, number, info->si_addr);
    if (write(2, message, static_cast<size_t>(length)) < 0) _exit(71);
    _exit(70);
}

void catch_signals() {
    static unsigned char own_stack[64 << 10];
    stack_t stack{};
    stack.ss_sp = own_stack;
    stack.ss_size = sizeof own_stack;
    sigaltstack(&stack, nullptr);
    struct sigaction action{};
    action.sa_sigaction = handle_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(number, &action, nullptr);
}

}  // namespace
}  // namespace emulator
