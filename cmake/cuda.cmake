# SPDX-License-Identifier: Apache-2.0
# The CUDA language, and crossdock_cuda: the runtime, and headers and flags of sources in that language. C++ sources that
# use CUDA or NCCL are named by crossdock_includes_cuda. All others are compiled as in builds without CUDA, with stand-ins
# for the types that public headers name. Neither NCCL nor the driver is linked, both are opened when the first GPU group
# is made.
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

find_path(CROSSDOCK_NCCL_INCLUDE_FOUND nccl_device.h HINTS ${CROSSDOCK_NCCL_INCLUDE} NO_CACHE)
if(NOT CROSSDOCK_NCCL_INCLUDE_FOUND)
    message(FATAL_ERROR "No nccl_device.h: set CROSSDOCK_NCCL_INCLUDE to the include folder of NCCL 2.30.4 or newer "
        "(./dev fetches it)")
endif()
file(STRINGS ${CROSSDOCK_NCCL_INCLUDE_FOUND}/nccl.h nccl_code_line REGEX "^#define NCCL_VERSION_CODE +[0-9]+$")
string(REGEX MATCH "[0-9]+$" nccl_code "${nccl_code_line}")
if(NOT nccl_code OR nccl_code LESS 23004)
    message(FATAL_ERROR "${CROSSDOCK_NCCL_INCLUDE_FOUND}/nccl.h has version code ${nccl_code}: 23004 (2.30.4) is needed")
endif()

# NCCL's before the toolkit's, which may carry an older nccl.h.
set(crossdock_cuda_folders ${CROSSDOCK_NCCL_INCLUDE_FOUND} ${CUDAToolkit_INCLUDE_DIRS})

# crossdock_includes_cuda(SOURCES...): sources of the current folder that use CUDA or NCCL, in whose headers are functions
# that not everybody uses.
function(crossdock_includes_cuda)
    set_source_files_properties(${ARGN} PROPERTIES
        INCLUDE_DIRECTORIES "${crossdock_cuda_folders}" COMPILE_OPTIONS -Wno-unused-function)
endfunction()

add_library(crossdock_cuda INTERFACE)
target_include_directories(crossdock_cuda SYSTEM INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:${crossdock_cuda_folders}>")
target_link_libraries(crossdock_cuda INTERFACE $<LINK_ONLY:CUDA::cudart_static>)
target_compile_definitions(crossdock_cuda INTERFACE $<$<BOOL:${CROSSDOCK_TIMELINE}>:CROSSDOCK_TIMELINE>)
# CMake 3.25 does not know that this nvcc speaks C++20, so its own property for the standard is of no use.
# What a kernel knows at compile time (kernels/ll/variants.h) leaves code that cannot be reached, which is meant: 128,
# 177 and 186 warn of it.
target_compile_options(crossdock_cuda INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--expt-relaxed-constexpr;--diag-suppress=128,177,186>")
# Machine code for the GPUs that are here, or else for those that the project is measured on, and PTX, which the driver
# compiles, for newer ones. As in python/backend/crossdock_build.py.
set(crossdock_architectures ${CROSSDOCK_CUDA_ARCHITECTURES})
if(NOT crossdock_architectures)
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
        OUTPUT_VARIABLE capabilities ERROR_QUIET RESULT_VARIABLE failed)
    string(REGEX MATCHALL "[0-9]+[.][0-9]+" capabilities "${capabilities}")
    list(TRANSFORM capabilities REPLACE "[.]" "")
    list(FILTER capabilities EXCLUDE REGEX "^[5-7][0-9]$")
    list(SORT capabilities COMPARE NATURAL)
    list(POP_BACK capabilities newest)
    list(APPEND capabilities ${newest})
    list(TRANSFORM capabilities REPLACE "^10[0-9]$" "100f") # code for a whole family
    list(REMOVE_DUPLICATES capabilities)
    if(failed OR NOT capabilities)
        set(capabilities 90 100f)
    else()
        list(APPEND capabilities ${newest}-virtual)
    endif()
    set(crossdock_architectures ${capabilities})
endif()
message(STATUS "GPU architectures: ${crossdock_architectures}")
foreach(arch IN LISTS crossdock_architectures)
    if(NOT arch MATCHES "^([0-9]+[af]?)(-virtual|-for-([0-9]+[af]?))?$")
        message(FATAL_ERROR "CROSSDOCK_CUDA_ARCHITECTURES has ${arch}, allowed: such as 90, 100f, 90-virtual, 80-for-90")
    endif()
    set(number ${CMAKE_MATCH_1})
    set(code sm_${number})
    if(CMAKE_MATCH_2 STREQUAL "-virtual")
        set(code compute_${number})
    elseif(CMAKE_MATCH_3) # an older GPU's code on a newer one, for tests
        set(code sm_${CMAKE_MATCH_3})
    endif()
    target_compile_options(crossdock_cuda INTERFACE
        $<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_${number},code=${code}>)
endforeach()
# The list above names family variants (100f), which this CMake's own property does not know.
set(CMAKE_CUDA_ARCHITECTURES OFF)
