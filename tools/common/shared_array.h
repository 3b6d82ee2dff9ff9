// SPDX-License-Identifier: Apache-2.0
// An array that this process shares with the children it forks afterwards.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <type_traits>

namespace crossdock::tools {

// Zeroed; anonymous, so nothing outlives the last process that maps it. Only types that may live in shared memory.
template <class Element>
class SharedArray {
    static_assert(std::is_trivially_destructible_v<Element>);

  public:
    explicit SharedArray(size_t size) : size_(size) {
        void* memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            throw std::bad_alloc();
        }
        data_ = static_cast<Element*>(memory);
    }
    ~SharedArray() { munmap(data_, bytes()); }
    SharedArray(const SharedArray&) = delete;
    SharedArray& operator=(const SharedArray&) = delete;

    size_t size() const { return size_; }
    Element* data() { return data_; }
    const Element* data() const { return data_; }
    Element& operator[](size_t index) { return data_[index]; }
    const Element& operator[](size_t index) const { return data_[index]; }

  private:
    size_t bytes() const { return size_ > 0 ? size_ * sizeof(Element) : 1; }

    size_t size_;
    Element* data_ = nullptr;
};

}  // namespace crossdock::tools
