// SPDX-License-Identifier: Apache-2.0
//
// weft_completion FILE: writes the completion of bash. Run by the build.
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "commands/help.hpp"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: weft_completion FILE\n", stderr);
    return 2;
  }
  const std::filesystem::path path = argv[1];
  std::filesystem::create_directories(path.parent_path());
  if ((std::ofstream(path) << weft::commands::bash_completion()).flush()) return 0;
  std::fprintf(stderr, "%s: cannot be written\n", path.c_str());
  return 6;
}
