// SPDX-License-Identifier: Apache-2.0
#include "session.h"

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <stdexcept>

namespace crossdock::network {
namespace {

std::mutex g_mutex;
std::string g_message;

void remember(int level, unsigned long, const char*, int, const char* format, ...) {
    if (level != plugin::kLogWarn) return;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    const std::lock_guard lock(g_mutex);
    g_message = text;
}

}  // namespace

std::string last_message() {
    const std::lock_guard lock(g_mutex);
    return g_message;
}

Session::Session(TestRank& rank, int num_contexts) {
    check(table().init(&instance_, 42, remember), "init");
    char handle[plugin::kHandleBytes];
    void* listener = nullptr;
    check(table().listen(instance_, 0, handle, &listener), "listen");
    std::vector<std::vector<std::byte>> all = rank.exchange(handle);
    std::vector<void*> handles;
    for (auto& each : all) handles.push_back(each.data());
    check(table().connect(instance_, handles.data(), rank.num_ranks(), rank.rank(), listener, &comm_), "connect");
    check(table().close_listen(listener), "closeListen");
    plugin::Config14 config{num_contexts, -1};
    check(table().create_context(comm_, &config, &contexts_), "createContext");
}

void Session::close() {
    if (instance_ == nullptr) return;
    destroy_contexts();
    table().close_comm(comm_);
    table().finalize(instance_);
    instance_ = nullptr;
}

void Session::check(ncclResult_t result, const char* call) const {
    if (result == ncclSuccess) return;
    throw std::runtime_error(std::string(call) + " gave " + std::to_string(result) + ": " + last_message());
}

void Session::destroy_contexts() {
    if (contexts_ != nullptr) table().destroy_context(contexts_);
    contexts_ = nullptr;
}

void* Session::add_memory(void* data, size_t bytes, int type, uint64_t flags) {
    void* memory = nullptr;
    check(table().register_memory(comm_, data, bytes, type, flags, &memory), "regMrSym");
    return memory;
}

void Session::remove_memory(void* memory) { check(table().deregister_memory(comm_, memory), "deregMrSym"); }

void* Session::put(int peer, void* source, uint64_t source_offset, size_t bytes, void* target, uint64_t target_offset,
                   int context) {
    void* request = nullptr;
    check(table().put(contexts_, context, source_offset, source, bytes, target_offset, target,
                      static_cast<uint32_t>(peer), &request),
          "iput");
    return request;
}

void* Session::put_signal(int peer, void* source, uint64_t source_offset, size_t bytes, void* target,
                          uint64_t target_offset, void* signals, uint64_t signal_offset, uint64_t value, bool is_strong,
                          int context) {
    void* request = nullptr;
    check(table().put_signal(contexts_, context, source_offset, source, bytes, target_offset, target,
                             static_cast<uint32_t>(peer), signal_offset, signals, value, plugin::kSignalAdd, is_strong,
                             &request),
          "iputSignal");
    return request;
}

void* Session::get(int peer, void* remote, uint64_t remote_offset, size_t bytes, void* local, uint64_t local_offset,
                   int context) {
    void* request = nullptr;
    check(table().get(contexts_, context, remote_offset, remote, bytes, local_offset, local,
                      static_cast<uint32_t>(peer), &request),
          "iget");
    return request;
}

void* Session::flush(int peer, int context) {
    void* request = nullptr;
    check(table().flush(contexts_, context, nullptr, static_cast<uint32_t>(peer), &request), "iflush");
    return request;
}

bool Session::test(void* request) {
    int done = 0;
    check(table().test(comm_, request, &done), "test");
    return done != 0;
}

void Session::progress() {
    check(table().progress(contexts_), "rmaProgress");
    bool has_error = false;
    check(table().query_last_error(contexts_, &has_error), "queryLastError");
    if (has_error) throw std::runtime_error("queryLastError says that there is an error");
}

void Session::finish(void* request) {
    while (!test(request)) {
    }
}

void Session::await_word(const uint64_t& word, uint64_t least) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(50);
    while (std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_acquire) < least) {
        progress();
        if (std::chrono::steady_clock::now() > end) throw std::runtime_error("a signal did not come");
    }
}

void expect_refused(TestRank& rank, ncclResult_t result, ncclResult_t wanted,
                    std::initializer_list<const char*> words) {
    const std::string message = last_message();
    rank.expect(result == wanted, "the result is " + std::to_string(result) + ", not " + std::to_string(wanted));
    for (const char* word : words) {
        rank.expect(message.find(word) != std::string::npos, "'" + message + "' lacks '" + word + "'");
    }
}

}  // namespace crossdock::network
