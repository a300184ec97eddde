// SPDX-License-Identifier: Apache-2.0
//
// The output of a command: a directory or a file that appears under its name when it is complete. Until then it is in a
// directory of its own,
//
//   PATH.TOKEN.tmp        in the same directory, which is renamed at the end; TOKEN is different in every process
//   PATH/NAME.TOKEN.tmp   if PATH exists and holds other files, or cannot be renamed (a mount point, a symbolic link):
//                         its entries are renamed at the end, one after the other
//
// that is locked (flock) while the process lives. A command that is repeated after a kill removes what the killed one
// has left, which is not locked any more. A second command with the same output ends with an error, except that any
// number of processes may write a `shared_file`: the last one that publishes it replaces the others. The locks only
// decide what is removed: without them (a file system that has none) leftovers stay, with a warning, and processes
// still write to directories of different names.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.hpp"

namespace weft::storage {

class PendingOutput {
 public:
  enum class Kind { directory, file, shared_file };

  /// Removes what interrupted commands with this output have left, and creates the directory to write to, with missing
  /// parents. A file may exist, and is replaced. A directory may exist if it is empty; with `names`, names that the
  /// output will have in it, if it holds none of these. Throws Error(usage) if it exists otherwise, Error(io) if
  /// another process is writing it or if it cannot be created.
  explicit PendingOutput(std::filesystem::path path, Kind kind = Kind::directory, std::vector<std::string> names = {});
  PendingOutput(const PendingOutput&) = delete;
  /// Removes the output if it was not published. Files in it must be closed.
  ~PendingOutput();

  const std::filesystem::path& path() const { return path_; }
  /// Where to write: an empty directory, or the name of the file to create.
  const std::filesystem::path& place() const { return place_; }

  /// Syncs all files and gives the output its name. To be called once. Throws Error(io).
  void publish();

 private:
  const std::filesystem::path path_;
  const Kind kind_;
  bool inside_ = false;  ///< of an existing directory
  std::filesystem::path temporary_, place_;
  Descriptor lock_;
  bool published_ = false;
};

/// Removes from `folder` what interrupted commands have left of any output.
void remove_interrupted_outputs(const std::filesystem::path& folder);

/// Writes a directory: `fill` receives PendingOutput::place().
void write_new_directory(const std::filesystem::path& path,
                         const std::function<void(const std::filesystem::path& place)>& fill);

/// Writes a `shared_file`, in place of one of this name.
void write_shared_text(const std::filesystem::path& path, std::string_view text);

}  // namespace weft::storage
