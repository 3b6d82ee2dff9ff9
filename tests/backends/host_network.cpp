// SPDX-License-Identifier: Apache-2.0
#include "host_network.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <deque>
#include <new>
#include <stdexcept>

namespace crossdock::testing {
namespace {

constexpr const char* kCable = "eth0";

void check(bool is_good, const char* what) {
    if (!is_good) throw std::runtime_error(fmt::format("{}: {}", what, std::strerror(errno)));
}

int open_checked(const char* path, int flags) {
    const int descriptor = open(path, flags | O_CLOEXEC);
    check(descriptor >= 0, path);
    return descriptor;
}

ifreq request_for(const char* interface) {
    ifreq request{};
    std::strncpy(request.ifr_name, interface, IFNAMSIZ - 1);
    return request;
}

void set_up(const char* interface) {
    const int socket = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    check(socket >= 0, "socket");
    ifreq request = request_for(interface);
    check(ioctl(socket, SIOCGIFFLAGS, &request) == 0, "an interface's flags");
    request.ifr_flags = static_cast<short>(request.ifr_flags | IFF_UP | IFF_RUNNING);
    check(ioctl(socket, SIOCSIFFLAGS, &request) == 0, "an interface up");
    close(socket);
}

void set_address(const char* interface, const std::string& address) {
    const int socket = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    check(socket >= 0, "socket");
    for (const auto& [what, text] :
         {std::pair(SIOCSIFADDR, address), std::pair(SIOCSIFNETMASK, std::string("255.255.255.0"))}) {
        ifreq request = request_for(interface);
        auto& place = reinterpret_cast<sockaddr_in&>(request.ifr_addr);
        place.sin_family = AF_INET;
        inet_pton(AF_INET, text.c_str(), &place.sin_addr);
        check(ioctl(socket, static_cast<unsigned long>(what), &request) == 0, "an interface's address");
    }
    close(socket);
}

uint64_t now_us() {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count());
}

// On its way through the switch.
struct Frame {
    uint64_t leaves_us;
    std::vector<std::byte> bytes;
};

}  // namespace

std::string HostNetwork::why_impossible() {
    if (geteuid() != 0) return "making hosts needs root";
    try {
        const HostNetwork network(1);
        return "";
    } catch (const std::exception& error) {
        return fmt::format("no network namespaces or TAP devices here ({})", error.what());
    }
}

// In namespaces that are new; the caller goes back to its own.
HostNetwork::Host HostNetwork::make_host(int number) {
    check(unshare(CLONE_NEWNET | CLONE_NEWIPC) == 0, "unshare");
    Host host;
    host.network = open_checked("/proc/self/ns/net", O_RDONLY);
    host.ipc = open_checked("/proc/self/ns/ipc", O_RDONLY);
    host.tap = open_checked("/dev/net/tun", O_RDWR | O_NONBLOCK);
    ifreq request = request_for(kCable);
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    check(ioctl(host.tap, TUNSETIFF, &request) == 0, "a TAP device");
    set_address(kCable, fmt::format("10.77.0.{}", number + 1));
    set_up(kCable);
    set_up("lo");
    return host;
}

HostNetwork::HostNetwork(int num_hosts) {
    void* memory = mmap(nullptr, sizeof(Cables), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "mmap");
    cables_ = new (memory) Cables{};
    const int own_network = open_checked("/proc/self/ns/net", O_RDONLY);
    const int own_ipc = open_checked("/proc/self/ns/ipc", O_RDONLY);
    std::string failure;
    try {
        for (int host = 0; host < num_hosts; ++host) hosts_.push_back(make_host(host));
    } catch (const std::exception& error) {
        failure = error.what();
    }
    setns(own_network, CLONE_NEWNET);
    setns(own_ipc, CLONE_NEWIPC);
    close(own_network);
    close(own_ipc);
    if (!failure.empty()) throw std::runtime_error(failure);
    switch_ = fork();
    check(switch_ >= 0, "fork");
    if (switch_ == 0) run_switch();
}

HostNetwork::~HostNetwork() {
    kill(switch_, SIGKILL);
    waitpid(switch_, nullptr, 0);
    for (const Host& host : hosts_) {
        for (const int descriptor : {host.network, host.ipc, host.tap}) close(descriptor);
    }
    munmap(cables_, sizeof(Cables));
}

void HostNetwork::enter(int host) const {
    const Host& entered = hosts_.at(static_cast<size_t>(host));
    check(setns(entered.network, CLONE_NEWNET) == 0, "setns");
    check(setns(entered.ipc, CLONE_NEWIPC) == 0, "setns");
    // UCX finds devices in /sys, which shows those of the network namespace in which it was mounted.
    check(unshare(CLONE_NEWNS) == 0, "unshare");
    check(mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0, "mount");
    check(mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0, "mount of /sys");
    for (const Host& each : hosts_) close(each.tap);  // or a cable would outlive the switch
}

void HostNetwork::meet(int num_processes) {
    ++cables_->num_met;
    while (cables_->num_met < num_processes) sched_yield();
}

// Frames from a host go to all others, which ignore those not addressed to them.
void HostNetwork::run_switch() const {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::vector<std::deque<Frame>> queues(hosts_.size());
    std::vector<uint64_t> free_us(hosts_.size());
    std::vector<std::byte> buffer(65536);
    for (;;) {
        std::vector<pollfd> polls;
        for (const Host& host : hosts_) polls.push_back({host.tap, POLLIN, 0});
        const bool is_busy =
            std::any_of(queues.begin(), queues.end(), [](const auto& queue) { return !queue.empty(); });
        poll(polls.data(), polls.size(), is_busy ? 0 : 10);
        for (size_t from = 0; from < hosts_.size(); ++from) {
            const ssize_t got = read(hosts_[from].tap, buffer.data(), buffer.size());
            if (got <= 0 || cables_->is_cut[from]) continue;
            for (size_t to = 0; to < hosts_.size(); ++to) {
                if (to == from || cables_->is_cut[to]) continue;
                const uint64_t limit = cables_->bytes_per_ms;
                const uint64_t takes_us = limit == 0 ? 0 : static_cast<uint64_t>(got) * 1000 / limit;
                free_us[to] = std::max(free_us[to], now_us()) + takes_us;
                queues[to].push_back({free_us[to] + cables_->delay_us, {buffer.data(), buffer.data() + got}});
            }
        }
        for (size_t to = 0; to < hosts_.size(); ++to) {
            while (!queues[to].empty() && queues[to].front().leaves_us <= now_us()) {
                const Frame& frame = queues[to].front();
                // A frame that the host cannot accept is lost, as on any cable.
                if (!cables_->is_cut[to]) (void)!write(hosts_[to].tap, frame.bytes.data(), frame.bytes.size());
                queues[to].pop_front();
            }
        }
    }
}

}  // namespace crossdock::testing
