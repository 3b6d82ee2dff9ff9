// SPDX-License-Identifier: Apache-2.0
// Memory that processes share without a name in any file system: anonymous files, and mappings of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "device/platform.h"

namespace crossdock::cpu {

// A file descriptor, owned.
class FileDescriptor {
  public:
    explicit FileDescriptor(int fd = -1) : fd_(fd) {}
    ~FileDescriptor();
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    int get() const { return fd_; }

  private:
    int fd_;
};

// A shared, writable mapping, owned.
class Mapping {
  public:
    Mapping() = default;
    Mapping(int fd, size_t bytes);  // of the file's first bytes; Error with ncclSystemError
    ~Mapping();
    Mapping(Mapping&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Mapping& operator=(Mapping&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    std::byte* data() const { return data_; }
    size_t bytes() const { return bytes_; }

  private:
    std::byte* data_ = nullptr;
    size_t bytes_ = 0;
};

// A file of zeros; it ends with its last descriptor and mapping. Error with ncclSystemError.
FileDescriptor make_memory_file(size_t bytes);

// Descriptor fd of process pid, opened once more here. Error with ncclSystemError that says what is in the way.
FileDescriptor open_of_process(int64_t pid, int fd);

}  // namespace crossdock::cpu
