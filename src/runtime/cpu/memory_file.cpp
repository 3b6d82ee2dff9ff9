// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "core/error.h"

namespace crossdock::cpu {

namespace {

constexpr const char* kName = "crossdock";
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Kernels from 6.3 on may refuse files that could be executed; earlier ones do not know the flag.
int create_file() {
#ifdef MFD_NOEXEC_SEAL
    constexpr unsigned kNotExecutable = MFD_NOEXEC_SEAL;
#else
    constexpr unsigned kNotExecutable = 8;
#endif
    const int fd = memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING | kNotExecutable);
    return fd < 0 && errno == EINVAL ? memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING) : fd;
}

// Opening another file may block, or have effects.
bool is_memory_file(const std::string& path) {
    char target[64];
    const ssize_t length = readlink(path.c_str(), target, sizeof(target));
    return length < 0 ||
           std::string_view(target, static_cast<size_t>(length)) == fmt::format("/memfd:{} (deleted)", kName);
}

}  // namespace

FileDescriptor::~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
}

Mapping::Mapping(int fd, size_t bytes, size_t offset) {
    struct stat status = {};
    require(fstat(fd, &status) == 0 && offset <= static_cast<size_t>(status.st_size) &&
                bytes <= static_cast<size_t>(status.st_size) - offset,
            ncclSystemError, "cannot map {} bytes from {} of shared memory that has {}", bytes, offset, status.st_size);
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
    require(mapped != MAP_FAILED, ncclSystemError, "cannot map {} bytes of shared memory: {}", bytes,
            std::strerror(errno));
    data_ = static_cast<std::byte*>(mapped);
    bytes_ = bytes;
}

Mapping::~Mapping() {
    if (data_ != nullptr) munmap(data_, bytes_);
}

FileDescriptor make_memory_file(size_t bytes) {
    FileDescriptor file(create_file());
    require(file.get() >= 0, ncclSystemError, "cannot create shared memory (memfd_create): {}{}", std::strerror(errno),
            errno == EMFILE || errno == ENFILE ? "; ulimit -n says how many files a process may have open" : "");
    // Beyond this limit the kernel would kill the process.
    rlimit limit = {};
    getrlimit(RLIMIT_FSIZE, &limit);
    require(bytes <= limit.rlim_cur, ncclSystemError,
            "cannot create {} bytes of shared memory: files may have {} (ulimit -f)", bytes, limit.rlim_cur);
    require(bytes <= static_cast<size_t>(INT64_MAX) && ftruncate(file.get(), static_cast<off_t>(bytes)) == 0,
            ncclSystemError, "cannot create {} bytes of shared memory: {}", bytes, std::strerror(errno));
    // A peer that shrinks the file would kill the processes that have mapped it.
    require(fchmod(file.get(), S_IRUSR | S_IWUSR) == 0 && fcntl(file.get(), F_ADD_SEALS, kSeals) == 0, ncclSystemError,
            "cannot seal shared memory: {}", std::strerror(errno));
    return file;
}

FileDescriptor open_of_process(int64_t pid, int fd) {
    const auto path = fmt::format("/proc/{}/fd/{}", pid, fd);
    require(is_memory_file(path), ncclSystemError,
            "{} is not shared memory of this library: the process has closed it, or never had it", path);
    FileDescriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
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
    // Root could open other users' memory.
    struct stat status = {};
    require(fstat(file.get(), &status) == 0 && status.st_uid == geteuid(), ncclSystemError,
            "{} belongs to user {}, this process to user {}", path, status.st_uid, geteuid());
    require((fcntl(file.get(), F_GET_SEALS) & kSeals) == kSeals, ncclSystemError,
            "{} is shared memory whose size may change", path);
    return file;
}

}  // namespace crossdock::cpu
