// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/fiber.h"

#include <cxxabi.h>

#include <boost/context/detail/fcontext.hpp>
#include <cassert>
#include <cstring>
#include <utility>

#include "runtime/cpu/fiber_stack.h"

namespace crossdock::cpu {

using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

namespace {

thread_local const Fiber* t_running = nullptr;

}  // namespace

struct FiberEntry {
    static void enter(transfer_t from) {
        auto* fiber = static_cast<Fiber*>(from.data);
        fiber->caller_context_ = from.fctx;
        fiber->arrive();
        fiber->loop();
    }
};

Fiber::Fiber(size_t stack_bytes) : stack_bytes_(stack_bytes) {
    stack_ = acquire_stack(stack_bytes);
    context_ = make_fcontext(stack_ + stack_bytes_, stack_bytes_, &FiberEntry::enter);
    tsan_fiber_ = sanitizer::create_fiber();
}

Fiber::~Fiber() {
    assert(finished_);
    sanitizer::destroy_fiber(tsan_fiber_);
    release_stack(stack_, stack_bytes_);
}

const Fiber* Fiber::running() { return t_running; }

bool Fiber::is_in_guard(const void* address) const {
    const auto* place = static_cast<const std::byte*>(address);
    return place < stack_ && place >= stack_ - kGuardBytes;
}

void Fiber::start(void (*body)(void*), void* argument) {
    assert(finished_);
    body_ = body;
    argument_ = argument;
    finished_ = false;
}

void Fiber::resume() {
    assert(!finished_);
    // The C++ runtime tracks active exceptions per thread. Fibers interleave, so each has its own record.
    void* globals = abi::__cxa_get_globals();
    ExceptionState caller_state;
    std::memcpy(&caller_state, globals, sizeof(ExceptionState));
    std::memcpy(globals, &exception_state_, sizeof(ExceptionState));

    const Fiber* caller = std::exchange(t_running, this);
    void* caller_fake_stack = nullptr;
    tsan_caller_ = sanitizer::current_fiber();
    sanitizer::start_switch(&caller_fake_stack, stack_, stack_bytes_);
    sanitizer::switch_to_fiber(tsan_fiber_);
    context_ = jump_fcontext(context_, this).fctx;
    sanitizer::finish_switch(caller_fake_stack, nullptr, nullptr);
    t_running = caller;

    std::memcpy(&exception_state_, globals, sizeof(ExceptionState));
    std::memcpy(globals, &caller_state, sizeof(ExceptionState));
}

void Fiber::suspend() {
    sanitizer::start_switch(&fake_stack_, caller_stack_, caller_stack_bytes_);
    sanitizer::switch_to_fiber(tsan_caller_);
    caller_context_ = jump_fcontext(caller_context_, nullptr).fctx;
    arrive();
}

void Fiber::arrive() { sanitizer::finish_switch(fake_stack_, &caller_stack_, &caller_stack_bytes_); }

// One context runs all bodies, so a restart costs no more than a resume.
void Fiber::loop() {
    for (;;) {
        try {
            body_(argument_);
        } catch (...) {
            exception_ = std::current_exception();
        }
        finished_ = true;
        suspend();
    }
}

std::exception_ptr Fiber::take_exception() { return std::exchange(exception_, nullptr); }

}  // namespace crossdock::cpu
