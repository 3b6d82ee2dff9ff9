# SPDX-License-Identifier: Apache-2.0
# crossdock_options: how everything of this project is compiled; crossdock_library_options: how the library and the plugin
# are. Link them privately; they are never exported.
add_library(crossdock_options INTERFACE)
add_library(crossdock_library_options INTERFACE)
target_link_libraries(crossdock_library_options INTERFACE crossdock_options)
target_compile_features(crossdock_options INTERFACE cxx_std_20)
# The initialiser macros of nccl_ep.h name two fields and zero the rest, which g++ would report in every use.
target_compile_options(crossdock_options INTERFACE
    $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -Wno-missing-field-initializers>
    $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-unknown-pragmas -Wno-ignored-attributes>) # GCC's hints for vectors

# crossdock_runs_once(target SOURCES...): sources of the target that read options and write reports, in templates that
# take long to optimise. Joined where CROSSDOCK_UNITY is on, apart from the others.
function(crossdock_runs_once target)
    set(sources ${ARGN})
    if(CROSSDOCK_UNITY)
        list(TRANSFORM ARGN REPLACE "(.+)" "#include \"${CMAKE_CURRENT_SOURCE_DIR}/\\1\"\n" OUTPUT_VARIABLE includes)
        string(JOIN "" includes ${includes})
        set(sources ${CMAKE_CURRENT_BINARY_DIR}/${target}_runs_once.cpp)
        file(CONFIGURE OUTPUT ${sources} CONTENT "${includes}" @ONLY)
        set_source_files_properties(${ARGN} PROPERTIES HEADER_FILE_ONLY ON)
        target_sources(${target} PRIVATE ${sources})
    endif()
    set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS $<$<CONFIG:Release>:-O1>)
endfunction()

# crossdock_optimise_little(target): a program of tests, most of whose time is the library's.
function(crossdock_optimise_little target)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
    set_target_properties(${target} PROPERTIES CROSSDOCK_UNOPTIMISED ON) # with a sanitizer
endfunction()

# crossdock_join_sources(target [APART sources...]): where CROSSDOCK_UNITY is on, the target's C++ sources, all of which it
# has by now, are compiled ten at a time, which takes half as long. APART: those that have names in common with others.
function(crossdock_join_sources target)
    cmake_parse_arguments(join "" "" "APART" ${ARGN})
    if(CROSSDOCK_UNITY)
        get_target_property(cuda_sources ${target} SOURCES)
        list(FILTER cuda_sources INCLUDE REGEX "\\.cu$")
        set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 10)
        set_source_files_properties(${join_APART} ${cuda_sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
endfunction()

# crossdock_precompile(target headers...): parsed once instead of in each source, where the library is built to be used
# or for a sanitizer: half the time of most sources. Not in developers' builds, so that each source includes what it
# needs, and not where a launcher such as ccache knows sources that it has seen before.
function(crossdock_precompile target)
    if((CROSSDOCK_SANITIZE OR NOT CROSSDOCK_DEVELOPER) AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
        target_precompile_headers(${target} PRIVATE ${ARGN})
    endif()
endfunction()

if(CROSSDOCK_SANITIZE)
    set(sanitize_flags -fno-sanitize-recover=all -fno-omit-frame-pointer)
    # Tests are not searched for undefined behaviour beside another sanitizer: that would double the time to build them.
    string(REPLACE ",undefined" "" sanitizers_of_tests "${CROSSDOCK_SANITIZE}")
    # A target with the property CROSSDOCK_UNSANITIZED is linked with the sanitizer only, which still sees what it copies
    # and fills (memcpy, memset), and what its threads wait for.
    set(is_unsanitized $<BOOL:$<TARGET_PROPERTY:CROSSDOCK_UNSANITIZED>>)
    target_compile_options(crossdock_options INTERFACE $<$<NOT:${is_unsanitized}>:-fsanitize=${sanitizers_of_tests}>)
    target_compile_options(crossdock_library_options INTERFACE -fsanitize=${CROSSDOCK_SANITIZE})
    # Little optimisation and just lines for stack traces: that halves the time to build. ThreadSanitizer, which looks at
    # every access, is slow with what is not optimised at all.
    set(is_unoptimised $<BOOL:$<TARGET_PROPERTY:CROSSDOCK_UNOPTIMISED>>)
    if(CROSSDOCK_SANITIZE MATCHES thread)
        set(is_unoptimised $<AND:${is_unoptimised},${is_unsanitized}>)
    endif()
    # C callers put any number into an enum, and the library checks it: loading one is no mistake.
    target_compile_options(crossdock_options INTERFACE
        ${sanitize_flags} -fno-sanitize=enum $<IF:${is_unoptimised},-O0,-O1> -g1)
    target_link_options(crossdock_options INTERFACE -fsanitize=${CROSSDOCK_SANITIZE} ${sanitize_flags})
endif()
