# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` puts where: headers, both libraries, the CMake package `crossdock` and crossdock.pc.
include(CMakePackageConfigHelpers)

# A wheel has no links, so it carries the shared library once, under the name that programs load, and no archive.
set(installed_libraries nccl_ep_shared nccl_ep_static nccl_ep_lib)
if(SKBUILD)
    set(installed_libraries nccl_ep_shared nccl_ep_lib)
    set_target_properties(nccl_ep_shared PROPERTIES VERSION ${CROSSDOCK_INTERFACE_MAJOR})
    set(namelink NAMELINK_SKIP)
endif()
install(TARGETS ${installed_libraries} EXPORT crossdock-targets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ${namelink}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} PATTERN standin EXCLUDE)
install(DIRECTORY include/standin/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/crossdock_standin)

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/crossdock)
configure_package_config_file(cmake/crossdock-config.cmake.in ${PROJECT_BINARY_DIR}/crossdock-config.cmake
    INSTALL_DESTINATION ${package_folder} PATH_VARS CMAKE_INSTALL_INCLUDEDIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/crossdock-config-version.cmake COMPATIBILITY SameMajorVersion)
install(EXPORT crossdock-targets NAMESPACE crossdock:: DESTINATION ${package_folder})
install(FILES ${PROJECT_BINARY_DIR}/crossdock-config.cmake ${PROJECT_BINARY_DIR}/crossdock-config-version.cmake
    DESTINATION ${package_folder})

file(RELATIVE_PATH prefix_from_pkgconfig ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/crossdock.pc.in ${PROJECT_BINARY_DIR}/crossdock.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/crossdock.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
