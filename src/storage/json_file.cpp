// SPDX-License-Identifier: Apache-2.0
#include "storage/json_file.hpp"

#include "storage/durable.hpp"
#include "storage/ownership.hpp"
#include "storage/pending_output.hpp"

namespace weft::storage {
namespace {

std::string file_text(const Json& value) { return finite_json_text(value, 2) + "\n"; }

}  // namespace

void write_json(const std::filesystem::path& path, const Json& value) { write_json_text(path, file_text(value)); }

void write_pending_json(const std::filesystem::path& path, const Json& value) { write_text(path, file_text(value)); }

void write_json_text(const std::filesystem::path& path, std::string_view text) {
  // `require_ownership` is not used: this function also writes the end of a run that lost its directory.
  if (!owns_run_directory())
    throw error(ExitCode::io, "{}: not written, the run directory belongs to another run", path.string());
  write_shared_text(path, text);  // two ranks may write the end of one job
}

}  // namespace weft::storage
