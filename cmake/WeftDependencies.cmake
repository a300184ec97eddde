# SPDX-License-Identifier: Apache-2.0
# Every library that Weft uses. Each is found, never downloaded: scripts/setup.sh installs them.
find_package(MPI REQUIRED COMPONENTS C)
find_package(HDF5 REQUIRED COMPONENTS C)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)
find_package(CLI11 REQUIRED)
find_package(tomlplusplus REQUIRED)
find_package(Threads REQUIRED)

find_path(WEFT_CBLAS_INCLUDE cblas.h PATH_SUFFIXES openblas openblas-openmp REQUIRED)
find_library(WEFT_CBLAS_LIBRARY NAMES openblas REQUIRED)
add_library(weft_cblas INTERFACE)
target_include_directories(weft_cblas INTERFACE ${WEFT_CBLAS_INCLUDE})
target_link_libraries(weft_cblas INTERFACE ${WEFT_CBLAS_LIBRARY})

include(WeftKokkos)
if(WEFT_ENABLE_CUDA)
  find_package(CUDAToolkit 12.4 REQUIRED)
endif()
