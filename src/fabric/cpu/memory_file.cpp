// SPDX-License-Identifier: Apache-2.0
#include "fabric/cpu/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace crossdock::cpu {

FileDescriptor::~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
}

Mapping::Mapping(int fd, size_t bytes) {
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    require(mapped != MAP_FAILED, ncclSystemError, "cannot map {} bytes of shared memory: {}", bytes,
            std::strerror(errno));
    data_ = static_cast<std::byte*>(mapped);
    bytes_ = bytes;
}

Mapping::~Mapping() {
    if (data_ != nullptr) munmap(data_, bytes_);
}

FileDescriptor make_memory_file(size_t bytes) {
    FileDescriptor file(memfd_create("crossdock", MFD_CLOEXEC));
    require(file.get() >= 0, ncclSystemError, "cannot create shared memory (memfd_create): {}", std::strerror(errno));
    // Beyond this limit the kernel would kill the process.
    rlimit limit = {};
    getrlimit(RLIMIT_FSIZE, &limit);
    require(bytes <= limit.rlim_cur, ncclSystemError,
            "cannot create {} bytes of shared memory: files may have {} (ulimit -f)", bytes, limit.rlim_cur);
    require(bytes <= static_cast<size_t>(INT64_MAX) && ftruncate(file.get(), static_cast<off_t>(bytes)) == 0,
            ncclSystemError, "cannot create {} bytes of shared memory: {}", bytes, std::strerror(errno));
    return file;
}

FileDescriptor open_of_process(int64_t pid, int fd) {
    const auto path = fmt::format("/proc/{}/fd/{}", pid, fd);
    FileDescriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file.get() < 0) {
        const int reason = errno;
        const char* hint = reason == EACCES || reason == EPERM
                               ? "the ranks of one communicator run as the same user, without protection from debuggers"
                           : reason == EMFILE || reason == ENFILE
                               ? "ulimit -n says how many files a process may have open"
                               : "the process has ended, or is in another container or on another host";
        fail(ncclSystemError, "cannot open the shared memory of process {} ({}: {}): {}", pid, path,
             std::strerror(reason), hint);
    }
    return file;
}

}  // namespace crossdock::cpu
