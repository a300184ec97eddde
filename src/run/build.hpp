// SPDX-License-Identifier: Apache-2.0
//
// Version, source revision and compiler of this program, captured at build time (cmake/WeftBuildRecord.cmake).
#pragma once

namespace weft::run {

struct BuildRecord {
  const char* version;
  const char* revision;  ///< git commit, "unknown" outside a repository
  bool modified;         ///< the working tree had changes
  const char* compiler;
  const char* build_type;
  const char* cuda;  ///< version of nvcc, "" in a build without CUDA
};

extern const BuildRecord build_record;

}  // namespace weft::run
