// SPDX-License-Identifier: Apache-2.0
#include "storage/json_file.hpp"

#include <unistd.h>

#include "base/file.hpp"
#include "storage/ownership.hpp"

namespace weft::storage {

void write_json(const std::filesystem::path& path, const Json& value) {
  write_json_text(path, finite_json_text(value, 2) + "\n");
}

void write_json_text(const std::filesystem::path& path, std::string_view text) {
  // `require_ownership` is not used: this function also writes the end of a run that lost its directory.
  if (!owns_run_directory())
    throw error(ExitCode::io, "{}: not written, the run directory belongs to another run", path.string());
  // The name contains the process id: two processes that write the end of one job use different temporary files.
  const std::string temporary = fmt::format("{}.{}.tmp", path.string(), getpid());
  Descriptor file = create_own(temporary);
  try {
    write_all(file, text, path);
    if (fsync(file) != 0 || !file.close()) fail_with_errno(path, "writing");
    if (rename(temporary.c_str(), path.c_str()) != 0) fail_with_errno(path, "renaming into place");
  } catch (...) {
    unlink(temporary.c_str());
    throw;
  }
}

}  // namespace weft::storage
