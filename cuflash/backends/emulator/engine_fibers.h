// Fibers: each CUDA thread has its own stack; these functions switch between them. A part of
// engine.cpp.
#pragma once

namespace emulator {
namespace {

constexpr size_t STACK_BYTES = 256 << 10, GUARD_BYTES = 4096;

// Pushes the callee-saved registers, stores the stack pointer and continues on the other stack.
extern "C" void emulator_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, . - emulator_switch
)");
constexpr int SAVED_WORDS = 6, RETURN_WORD = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, %function
emulator_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x2, sp
    str x2, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size emulator_switch, . - emulator_switch
)");
constexpr int SAVED_WORDS = 20, RETURN_WORD = 11;
#else
#error "The emulator's fibers are written for x86-64 and AArch64"
#endif

[[noreturn]] void run_thread();
[[gnu::cold, gnu::noinline]] void report_trace();
void check_end();
void check_copies_have_landed();
void check_end_of_block();

// Prepares a stack on which emulator_switch continues in run_thread.
void prepare_stack(Thread& t) {
    auto* top = reinterpret_cast<void**>(t.stack + STACK_BYTES) - 4;    // 32-byte aligned
#if defined(__x86_64__)
    void** frame = top - SAVED_WORDS - 2;                   // as if called: rsp % 16 is 8 within
#else
    void** frame = top - SAVED_WORDS;
#endif
    memset(frame, 0, sizeof(void*) * SAVED_WORDS);
    frame[RETURN_WORD] = reinterpret_cast<void*>(&run_thread);
    t.stack_pointer = frame;
}

// The running warp's lanes that the scheduler has chosen and that have not run yet, in the order
// of positions 0 to 31. A lane that leaves switches to the next one itself, as most switches are
// between the lanes of a warp.
struct ChosenLanes {
    int warp = 0, first = 0, step = 1, position = LANES;
    uint32_t lanes = 0;
};
ChosenLanes chosen;

// The stack of the next one, which becomes the running thread; null if there is none.
void* enter_next_lane() {
    while (chosen.position < LANES) {
        const int lane = (chosen.first + chosen.position++ * chosen.step) % LANES;
        if ((chosen.lanes >> lane & 1) == 0) continue;
        const int index = chosen.warp * LANES + lane;
        thread = &block->threads[index];
        block->warps[chosen.warp].ready &= ~(1u << lane);
        --block->ready;
        threadIdx = {static_cast<unsigned>(index % launch.block_threads), 0, 0};
        blockIdx = {static_cast<unsigned>(block_of(*block, index)), 0, 0};
        return thread->stack_pointer;
    }
    thread = nullptr;
    return nullptr;
}

[[noreturn]] void report_overflow() {
    fprintf(stderr, "block %d, thread %d: a stack overflow\n", block_of(*block, thread->index),
            thread->index % launch.block_threads);
    exit(70);
}

// Switches to the next lane, or to the scheduler. The thread continues when it is READY and chosen.
void leave() {
    in_engine = true;
    Thread& leaving = *thread;
    if (__builtin_frame_address(0) < leaving.stack) report_overflow();
    void* next = enter_next_lane();
    emulator_switch(&leaving.stack_pointer, next == nullptr ? scheduler_stack : next);
    while (reporting) report_trace();
    in_engine = false;
}

void run_thread() {
    in_engine = false;
    entry(launch.arguments);
    check_end();
    thread->state = State::ENDED;
    check_copies_have_landed();
    if (block->living == 1) check_end_of_block();
    --block->living;
    leave();
    abort();
}

void make_ready(Thread& t) {
    if (t.state == State::READY) return;
    t.state = State::READY;
    block->warps[t.index / LANES].ready |= 1u << t.index % LANES;
    ++block->ready;
}

void note_wait(const char* operation, Site site, Awaited awaited = Awaited::THREADS,
               uint64_t awaited_at = 0) {
    thread->state = State::WAITS;
    thread->operation = operation;
    thread->site = site;
    thread->awaited = awaited;
    thread->awaited_at = awaited_at;
}

void wait_in(const char* operation, Site site, Awaited awaited = Awaited::THREADS,
             uint64_t awaited_at = 0) {
    note_wait(operation, site, awaited, awaited_at);
    leave();
}

}  // namespace
}  // namespace emulator
