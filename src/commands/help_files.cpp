// SPDX-License-Identifier: Apache-2.0
//
// weft_help_files DIR VERSION: writes manual pages and completion below DIR. Run by the build.
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "commands/help.hpp"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: weft_help_files DIR VERSION\n", stderr);
    return 2;
  }
  for (const auto& [name, text] : weft::commands::shared_files(argv[2])) {
    const std::filesystem::path path = std::filesystem::path(argv[1]) / name;
    std::filesystem::create_directories(path.parent_path());
    if (!(std::ofstream(path) << text).flush()) {
      std::fprintf(stderr, "%s: cannot be written\n", path.c_str());
      return 6;
    }
  }
  return 0;
}
