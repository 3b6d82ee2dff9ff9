// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/tensors.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace crossdock::testing {
namespace {

constexpr std::byte kGuard{0xC7};
constexpr size_t kBufferAlignment = 256;

size_t rounded_up(size_t bytes) { return (bytes + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment; }

}  // namespace

Buffer::Buffer(RankContext& context, cudaStream_t stream, size_t bytes, WindowArena* arena, size_t shift)
    : context_(context), stream_(stream), bytes_(bytes), shift_(shift), arena_(arena) {
    const size_t total = bytes + 2 * kGuardBytes + shift;
    if (arena_ != nullptr) {
        if (arena_->used + total > arena_->window.bytes) throw std::logic_error("the test's window is too small");
        base_ = arena_->window.memory + arena_->used;
        arena_->used += rounded_up(total);
    } else {
        base_ = static_cast<std::byte*>(context.allocate(total));
    }
    std::vector<std::byte> on_host(context.is_gpu() ? total : 0);
    std::byte* filled = context.is_gpu() ? on_host.data() : base_;
    std::fill_n(filled, total, kGuard);
    std::fill_n(filled + kGuardBytes + shift, bytes, kPoison);
    if (context.is_gpu()) context.copy_to_device(base_, filled, total, stream);
}

Buffer::~Buffer() {
    // Also where a call has failed, after which nobody looks at the outputs.
    if (!context_.is_gpu()) check_guards("a buffer");
    if (arena_ == nullptr) context_.deallocate(base_);
}

void Buffer::poison() {
    if (context_.is_gpu()) return write(std::vector<std::byte>(bytes_, kPoison));
    std::fill_n(data(), bytes_, kPoison);
}

std::vector<std::byte> Buffer::read() const {
    std::vector<std::byte> bytes(bytes_);
    context_.copy_to_host(bytes.data(), data(), bytes_, stream_);
    return bytes;
}

void Buffer::check(const std::vector<std::byte>& expected, size_t row_bytes, const std::string& name) const {
    const std::vector<std::byte> on_host = context_.is_gpu() ? read() : std::vector<std::byte>{};
    const std::byte* seen = context_.is_gpu() ? on_host.data() : data();
    context_.add_to_digest(seen, bytes_);
    check_guards(name);
    if (expected.size() == bytes_ && std::memcmp(seen, expected.data(), bytes_) == 0) return;
    const size_t at = static_cast<size_t>(std::mismatch(seen, seen + bytes_, expected.begin()).first - seen);
    size_t differing = 0;
    for (size_t i = 0; i < bytes_; ++i) differing += seen[i] != expected[i];
    const bool unexpected = expected[at] == kPoison;
    const bool missing = seen[at] == kPoison;
    RANK_CHECK(context_, false, "{} differs in {} of {} bytes, first in row {}, byte {}: {:#04x}, expected {:#04x}{}",
               name, differing, bytes_, at / row_bytes, at % row_bytes, static_cast<int>(seen[at]),
               static_cast<int>(expected[at]),
               unexpected ? " (untouched)"
               : missing  ? " (was not written)"
                          : "");
}

void Buffer::check_guards(const std::string& name) const {
    std::array<std::byte, 2 * kGuardBytes> zones;
    context_.copy_to_host(zones.data(), base_, kGuardBytes, stream_);
    context_.copy_to_host(zones.data() + kGuardBytes, data() + bytes_, kGuardBytes, stream_);
    const bool before =
        std::all_of(zones.begin(), zones.begin() + kGuardBytes, [](std::byte b) { return b == kGuard; });
    const bool after = std::all_of(zones.begin() + kGuardBytes, zones.end(), [](std::byte b) { return b == kGuard; });
    RANK_CHECK(context_, before, "memory before {} was written", name);
    RANK_CHECK(context_, after, "memory after {} was written", name);
}

Tensor::Tensor(ncclDataType_t type, const std::vector<size_t>& sizes, void* data)
    : sizes_(std::make_unique<size_t[]>(sizes.size())), tensor_(std::make_unique<ncclEpTensor_t>(NCCL_EP_TENSOR_INIT)) {
    std::copy(sizes.begin(), sizes.end(), sizes_.get());
    tensor_->ndim = static_cast<unsigned>(sizes.size());
    tensor_->datatype = type;
    tensor_->data = data;
    tensor_->sizes = sizes_.get();
}

Tensor::Tensor(ncclDataType_t type, const std::vector<size_t>& sizes, const Buffer& buffer, Naming naming)
    : Tensor(type, sizes, buffer.data()) {
    if (naming == Naming::kData || buffer.arena()->window.handle == nullptr) return;
    if (naming == Naming::kWindowOnly) tensor_->data = nullptr;
    tensor_->win_hdl = buffer.arena()->window.handle;
    tensor_->win_offset = buffer.window_offset();
}

Tensor::~Tensor() {
    auto* extents = reinterpret_cast<volatile size_t*>(sizes_.get());
    for (unsigned i = 0; i < tensor_->ndim; ++i) extents[i] = ~size_t{0};
    auto* bytes = reinterpret_cast<volatile std::byte*>(tensor_.get());
    for (size_t i = 0; i < sizeof(ncclEpTensor_t); ++i) bytes[i] = kPoison;
}

}  // namespace crossdock::testing
