# SPDX-License-Identifier: Apache-2.0
# What the build uses of others; found here, so that every folder sees it. None of it is needed to use the library.
set(Boost_USE_STATIC_LIBS ON)
find_package(Boost QUIET COMPONENTS context)  # fibers of the CPU backends
find_package(fmt QUIET)                       # messages
if(NOT Boost_FOUND)
    list(APPEND missing_names "Boost's static library context")
    list(APPEND missing_packages libboost-context-dev)
endif()
if(NOT fmt_FOUND)
    list(APPEND missing_names fmt)
    list(APPEND missing_packages libfmt-dev)
endif()
if(missing_packages)
    list(JOIN missing_names ", " missing_names)
    list(JOIN missing_packages " " missing_packages)
    message(FATAL_ERROR
        "Missing on this system: ${missing_names}. On Debian and Ubuntu: apt-get install ${missing_packages}")
endif()
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# Ranks of several hosts and the network plugin, which are left out where the headers of UCX or OpenSSL are missing.
find_package(ucx CONFIG QUIET)
find_package(OpenSSL 3.0 QUIET)
set(crossdock_has_network ON)
if(NOT ucx_FOUND OR NOT OPENSSL_FOUND)
    set(crossdock_has_network OFF)
    message(STATUS "The headers of UCX (libucx-dev) or of OpenSSL 3 (libssl-dev) not found: ranks of several hosts and "
        "the network plugin are left out")
endif()

if(CROSSDOCK_DEVELOPER)
    find_package(CLI11 REQUIRED)
    find_package(nlohmann_json REQUIRED)
    # The demo and the benchmark build on machines that have no GoogleTest.
    find_package(GTest)
endif()
