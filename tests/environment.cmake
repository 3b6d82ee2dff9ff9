# SPDX-License-Identifier: Apache-2.0
# ctest reads this before it runs tests, so that they see nothing that a user has set for other programs, or a launcher
# for its jobs. What says where libraries are, and how to build, stays. Tests set what they are about.
set(users "^(NCCL|CROSSDOCK|UCX|TORCH[A-Z]*|NVTE|DEEP_?EP|EP|SLURM|OMPI|PMI[2X]?|MPI|FI|OMP|MKL|LC)_")
string(APPEND users "|^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|LANG|LANGUAGE)$")
string(APPEND users "|^(PYTHON(OPTIMIZE|WARNINGS|DEVMODE|SAFEPATH|STARTUP|HASHSEED)|COLUMNS|LINES|FORCE_COLOR)$")
set(kept "^CROSSDOCK_(NCCL_LIBRARY|NCCL_INCLUDE|UCX_LIBRARY|CRYPTO_LIBRARY|ENGINES_MIB|CUDA_ARCHITECTURES|UNITY|WERROR)$")
execute_process(COMMAND env OUTPUT_VARIABLE lines)
string(REGEX MATCHALL "(^|\n)[A-Za-z_0-9]+=" names "${lines}")
foreach(name IN LISTS names)
    string(REGEX REPLACE "[\n=]" "" name "${name}")
    if(name MATCHES "${users}" AND NOT name MATCHES "${kept}")
        unset(ENV{${name}})
    endif()
endforeach()
set(ENV{LC_ALL} C.UTF-8) # messages of the system are compared
