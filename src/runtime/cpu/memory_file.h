// SPDX-License-Identifier: Apache-2.0
// Memory that processes share through anonymous files, and mappings of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "device/platform.h"

namespace crossdock::cpu {

// Owns a file descriptor.
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

// Owns a shared, writable mapping.
class Mapping {
  public:
    Mapping() = default;
    // Of the file's bytes from `offset` on, a multiple of the page size. Throws ncclSystemError, also if they are not
    // all in the file: to touch those beyond its end would kill the process.
    Mapping(int fd, size_t bytes, size_t offset = 0);
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

// A file of zeros for this user only, freed with its last descriptor and mapping. Its size cannot change any more.
// Throws ncclSystemError.
FileDescriptor make_memory_file(size_t bytes);

// Opens the memory file that process pid has as descriptor fd. Throws ncclSystemError that says why it failed, also if
// the descriptor is not a file of make_memory_file by this user; only such a file is opened.
FileDescriptor open_of_process(int64_t pid, int fd);

}  // namespace crossdock::cpu
