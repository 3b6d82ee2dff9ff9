// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/stack_overflow.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "runtime/cpu/fiber.h"
#include "runtime/cpu/fiber_stack.h"

namespace crossdock::cpu {
namespace {

std::atomic<DescribeOverflow> g_describe{nullptr};
std::atomic<bool> g_is_set{false};  // the handler
struct sigaction g_earlier = {};

// The handler needs a stack of its own, as the thread's is used up. A program's or a sanitizer's is as good.
class AlternateStack {
  public:
    AlternateStack() {
        stack_t present = {};
        if (sigaltstack(nullptr, &present) != 0 || (present.ss_flags & SS_DISABLE) == 0) return;
        void* mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) return;
        stack_t own = {};
        own.ss_sp = memory_ = mapped;
        own.ss_size = kBytes;
        sigaltstack(&own, nullptr);
    }
    ~AlternateStack() {
        if (memory_ == nullptr) return;
        stack_t present = {};
        if (sigaltstack(nullptr, &present) == 0 && present.ss_sp == memory_) {
            stack_t none = {};
            none.ss_flags = SS_DISABLE;
            sigaltstack(&none, nullptr);
        }
        munmap(memory_, kBytes);
    }
    AlternateStack(const AlternateStack&) = delete;
    AlternateStack& operator=(const AlternateStack&) = delete;

  private:
    static constexpr size_t kBytes = 256 << 10;  // the earlier handler runs there, too; pages are used as needed

    void* memory_ = nullptr;
};

const void* instruction_of(const void* context) {
    const auto* registers = &static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    return reinterpret_cast<const void*>(registers->gregs[REG_RIP]);
#elif defined(__aarch64__)
    return reinterpret_cast<const void*>(registers->pc);
#else
    (void)registers;
    return nullptr;
#endif
}

void report(const Fiber& fiber, const void* instruction) {
    char text[1024];
    size_t length = 0;
    const auto append = [&](const char* format, const auto&... values) {
        length += fmt::format_to_n(text + length, sizeof(text) - 1 - length, fmt::runtime(format), values...).size;
        length = std::min(length, sizeof(text) - 1);
    };
    append("crossdock: stack overflow");
    // For addr2line: the file and the offset in it.
    Dl_info found = {};
    if (dladdr(instruction, &found) != 0 && found.dli_fname != nullptr) {
        const auto offset = reinterpret_cast<uintptr_t>(instruction) - reinterpret_cast<uintptr_t>(found.dli_fbase);
        append(" at {}+{:#x}", found.dli_fname, offset);
    }
    append(": ");
    const DescribeOverflow describe = g_describe.load();
    const size_t described =
        describe == nullptr ? 0 : describe(text + length, sizeof(text) - 1 - length, fiber.stack_bytes());
    length += described;
    if (described == 0) {
        append(
            "a rank's program in the simulation, or a call of the library, needs more than the {} KiB "
            "of its stack; large arrays belong on the heap",
            fiber.stack_bytes() >> 10);
    }
    text[length++] = '\n';
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, length);
}

void pass_on(int signal, siginfo_t* info, void* context) {
    if ((g_earlier.sa_flags & SA_SIGINFO) != 0) return g_earlier.sa_sigaction(signal, info, context);
    const bool is_fault = info->si_code > 0;  // not sent by a process
    if (g_earlier.sa_handler == SIG_IGN && !is_fault) return;
    if (g_earlier.sa_handler != SIG_IGN && g_earlier.sa_handler != SIG_DFL) return g_earlier.sa_handler(signal);
    struct sigaction standard = {};
    standard.sa_handler = SIG_DFL;
    ::sigaction(signal, &standard, nullptr);
    // A fault repeats itself when this returns, so the core shows its place.
    if (!is_fault) raise(signal);
}

void on_fault(int signal, siginfo_t* info, void* context) {
    const Fiber* fiber = Fiber::running();
    if (fiber != nullptr && info->si_code > 0 && fiber->is_in_guard(info->si_addr)) {
        report(*fiber, instruction_of(context));
    }
    pass_on(signal, info, context);
}

void set_handler() {
    struct sigaction own = {};
    own.sa_sigaction = on_fault;
    own.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&own.sa_mask);
    if (sigaction(SIGSEGV, nullptr, &g_earlier) == 0) sigaction(SIGSEGV, &own, nullptr);
}

}  // namespace

void report_stack_overflows(DescribeOverflow describe) noexcept {
    thread_local AlternateStack t_stack;
    (void)t_stack;
    if (describe != nullptr) g_describe.store(describe);
    if (!g_is_set.exchange(true)) set_handler();
}

}  // namespace crossdock::cpu
