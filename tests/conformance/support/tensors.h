// SPDX-License-Identifier: Apache-2.0
// Buffers whose every byte is accounted for, and tensor descriptors that are gone the moment a call returns.
#pragma once

#include <memory>
#include <vector>

#include "backends/rank_context.h"

namespace crossdock::testing {

// What fills memory that nobody has written yet: an odd byte, which makes huge numbers of every type.
inline constexpr std::byte kPoison{0xDB};

// A window from which buffers are cut. Every rank cuts the same sizes in the same order, so offsets agree.
struct WindowArena {
    Window window;
    size_t used = 0;
};

// Device memory between two guard zones. Lives in a window if an arena is given. Begins that many bytes behind a
// multiple of 256.
class Buffer {
  public:
    Buffer(RankContext& context, cudaStream_t stream, size_t bytes, WindowArena* arena = nullptr, size_t shift = 0);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::byte* data() const { return base_ + kGuardBytes + shift_; }
    size_t bytes() const { return bytes_; }
    const WindowArena* arena() const { return arena_; }
    uint64_t window_offset() const { return static_cast<uint64_t>(data() - arena_->window.memory); }

    void poison();
    void write(const std::vector<std::byte>& bytes) { write(bytes.data(), bytes.size()); }
    void write(const void* source, size_t bytes) { context_.copy_to_device(data(), source, bytes, stream_); }
    std::vector<std::byte> read() const;

    // Records a failure that names the buffer if it differs from `expected` anywhere, or a guard zone was written.
    // `row_bytes` is for the message.
    void check(const std::vector<std::byte>& expected, size_t row_bytes, const std::string& name) const;
    void check_guards(const std::string& name) const;

    // A fill for the guard zones, and the rows of the poison.
    static constexpr size_t kGuardBytes = 256;

  private:
    RankContext& context_;
    cudaStream_t stream_;
    size_t bytes_;
    size_t shift_;
    WindowArena* arena_;
    std::byte* base_;
};

// How a tensor names its memory.
enum class Naming { kData, kWindowOnly, kWindowAndData };

// A descriptor on the heap. Its destructor writes rubbish over descriptor and extents before it frees them, so that a
// library that kept a pointer shows it.
class Tensor {
  public:
    Tensor(ncclDataType_t type, const std::vector<size_t>& sizes, void* data);
    Tensor(ncclDataType_t type, const std::vector<size_t>& sizes, const Buffer& buffer, Naming naming = Naming::kData);
    ~Tensor();
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;

    ncclEpTensor_t* get() { return tensor_.get(); }
    ncclEpTensor_t* operator->() { return tensor_.get(); }
    operator ncclEpTensor_t*() { return tensor_.get(); }

  private:
    std::unique_ptr<size_t[]> sizes_;
    std::unique_ptr<ncclEpTensor_t> tensor_;
};

// Overwrites a struct with rubbish when it goes out of scope; for the structs that calls read.
template <typename Struct>
class Fleeting {
  public:
    explicit Fleeting(const Struct& value) : value_(std::make_unique<Struct>(value)) {}
    ~Fleeting() {
        auto* bytes = reinterpret_cast<volatile std::byte*>(value_.get());
        for (size_t i = 0; i < sizeof(Struct); ++i) bytes[i] = kPoison;
    }
    Struct* operator->() { return value_.get(); }
    Struct* get() { return value_.get(); }

  private:
    std::unique_ptr<Struct> value_;
};

}  // namespace crossdock::testing
