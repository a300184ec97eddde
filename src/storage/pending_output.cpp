// SPDX-License-Identifier: Apache-2.0
#include "storage/pending_output.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error.hpp"
#include "base/fault.hpp"
#include "base/log.hpp"
#include "base/progress.hpp"
#include "base/system.hpp"
#include "storage/durable.hpp"

namespace weft::storage {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kTokenDigits = 8;
constexpr std::string_view kTemporary = ".tmp";
/// A complete output in an existing directory, while its entries are renamed.
constexpr const char* kComplete = ".complete.tmp";

/// "runs/new/" -> "runs/new".
fs::path without_slash(const fs::path& path) { return path.filename().empty() ? path.parent_path() : path; }

/// True for "NAME.TOKEN.tmp"; with an empty name for that of any output.
bool is_temporary_of(const std::string& entry, const std::string& name) {
  constexpr std::size_t kSuffix = 1 + kTokenDigits + kTemporary.size();  // with the dot
  if (entry.size() <= kSuffix || !entry.ends_with(kTemporary)) return false;
  const std::size_t dot = entry.size() - kSuffix;
  return entry[dot] == '.' && (name.empty() || entry.substr(0, dot) == name) &&
         entry.find_first_not_of("0123456789abcdef", dot + 1) == dot + 1 + kTokenDigits;
}

enum class LockState { held, taken, unknown };

/// Locks a directory of this user, whose descriptor is stored at `descriptor`. `taken`: by another process. `unknown`:
/// it does not exist any more, belongs to another user, or the file system has no locks.
LockState try_lock(const fs::path& directory, Descriptor& descriptor) {
  descriptor = Descriptor(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  if (descriptor < 0 || ::fstat(descriptor, &status) != 0 || status.st_uid != ::geteuid()) return LockState::unknown;
  if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) return errno == EWOULDBLOCK ? LockState::taken : LockState::unknown;
  // The process that held it may have removed it before it was locked here.
  return ::fstat(descriptor, &status) == 0 && status.st_nlink > 0 ? LockState::held : LockState::unknown;
}

[[noreturn]] void refuse_second(const fs::path& path, const fs::path& temporary) {
  throw error(ExitCode::io, "{}: another process is writing it ({}); wait until it has ended, or choose another name",
              path.string(), temporary.string());
}

/// What commands with the output `name` have in `folder`; with an empty name with any output.
std::vector<fs::path> temporaries_in(const fs::path& folder, const std::string& name) {
  std::vector<fs::path> found;
  std::error_code failed;
  for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end; entry.increment(failed))
    if (is_temporary_of(entry->path().filename().string(), name) &&
        entry->symlink_status(failed).type() == fs::file_type::directory)
      found.push_back(entry->path());
  return found;
}

void remove_interrupted(const fs::path& temporary) {
  fs::remove_all(temporary);
  log::warning("{}: removed (left by an interrupted command)", temporary.string());
}

/// Removes from `folder` what interrupted commands with the output `path` have left. `alone`: another process that
/// writes it is an error.
void remove_leftovers(const fs::path& folder, const fs::path& path, bool alone = true) {
  for (const fs::path& temporary : temporaries_in(folder, path.filename().string())) {
    Descriptor descriptor;
    switch (try_lock(temporary, descriptor)) {
      case LockState::taken:
        if (alone) refuse_second(path, temporary);
        break;
      case LockState::held:
        remove_interrupted(temporary);
        break;
      case LockState::unknown:
        if (fs::exists(temporary))
          log::warning(
              "{}: not removed (left by another user, or on a file system without locks); remove it if no "
              "command is writing it",
              temporary.string());
    }
  }
}

/// Renames the entries of a complete output, in the order of their names, into the directory that holds it. May be
/// repeated after an interruption.
void move_out(const fs::path& complete, const fs::path& directory) {
  std::vector<fs::path> names;
  for (const auto& entry : fs::directory_iterator(complete)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  for (const fs::path& name : names) {
    if (fs::exists(fs::symlink_status(directory / name)))
      throw error(ExitCode::io, "{}: exists (nothing is overwritten; the complete new one is in {}); move one of them",
                  (directory / name).string(), complete.string());
    if (::rename((complete / name).c_str(), (directory / name).c_str()) != 0)
      fail_with_errno(complete / name, "renaming");
  }
  sync_directory(directory);
  fs::remove(complete);
}

/// Completes an output whose command was interrupted while its entries were renamed.
void finish_interrupted(const fs::path& directory) {
  const fs::path complete = directory / kComplete;
  if (!fs::is_directory(fs::symlink_status(complete))) return;
  Descriptor descriptor;
  if (try_lock(complete, descriptor) == LockState::taken) refuse_second(directory, complete);
  move_out(complete, directory);
}

void sync_tree(const fs::path& directory) {
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.is_symlink()) continue;
    if (entry.is_directory()) sync_tree(entry.path());
    if (entry.is_regular_file()) sync_file(entry.path());
    note_progress();
  }
  sync_directory(directory);
}

/// True if another directory cannot be renamed to this existing one.
bool keeps_its_name(const fs::path& directory) {
  struct stat own {
  }, parent{};
  return fs::is_symlink(directory) || ::stat(directory.c_str(), &own) != 0 ||
         ::stat(directory_of(directory).c_str(), &parent) != 0 || own.st_dev != parent.st_dev;
}

}  // namespace

PendingOutput::PendingOutput(fs::path path, Kind kind, std::vector<std::string> names)
    : path_(without_slash(path)), kind_(kind) {
  const fs::path parent = directory_of(path_);
  // 1. What is there.
  const bool exists = fs::exists(path_);
  remove_leftovers(parent, path_, kind != Kind::shared_file);
  if (kind == Kind::directory && exists) {
    if (!fs::is_directory(path_))
      throw error(ExitCode::usage, "{}: exists (nothing is overwritten); name a new directory, or remove this one",
                  path_.string());
    finish_interrupted(path_);
    remove_leftovers(path_, path_);
    const bool empty = fs::is_empty(path_);
    if (!empty && names.empty())
      throw error(ExitCode::usage, "{}: exists (nothing is overwritten); name a new directory, or remove this one",
                  path_.string());
    for (const std::string& name : names)
      if (fs::exists(fs::symlink_status(path_ / name)))
        throw error(ExitCode::io,
                    "{}: already holds {} (nothing is overwritten); remove it or choose another directory",
                    path_.string(), name);
    inside_ = !empty || keeps_its_name(path_);
  }

  // 2. The directory to write to. Another process may take one that is not locked yet for a leftover, and remove it.
  const fs::path folder = inside_ ? path_ : parent;
  if (!inside_) make_parents(path_);
  constexpr int kMostAttempts = 10;
  for (int attempt = 1;; ++attempt) {
    temporary_ = folder / fmt::format("{}.{}{}", path_.filename().string(), random_hex(kTokenDigits), kTemporary);
    if (::mkdir(temporary_.c_str(), 0777) != 0) {
      const int number = errno;
      throw error(ExitCode::io, "{}: cannot be created ({}); choose another directory", path_.string(),
                  std::generic_category().message(number));
    }
    const LockState own = try_lock(temporary_, lock_);
    if (own == LockState::held || (own == LockState::unknown && fs::exists(temporary_))) break;
    if (attempt == kMostAttempts) refuse_second(path_, temporary_);
  }
  place_ = kind_ == Kind::directory ? temporary_ : temporary_ / path_.filename();
  fault::point("output-begin");
}

PendingOutput::~PendingOutput() {
  std::error_code ignored;
  if (!published_) fs::remove_all(temporary_, ignored);
}

void PendingOutput::publish() {
  if (kind_ != Kind::directory) {
    sync_file(place_);
    fault::point("before-publish");
    rename_durably(place_, path_);
    published_ = true;
    std::error_code ignored;
    fs::remove(temporary_, ignored);
    return;
  }
  sync_tree(temporary_);
  fault::point("before-publish");
  const fs::path target = inside_ ? path_ / kComplete : path_;
  if (::rename(temporary_.c_str(), target.c_str()) != 0) {
    if (errno == ENOTEMPTY || errno == EEXIST)
      throw error(ExitCode::io, "{}: another process has written it (nothing is overwritten); choose another directory",
                  path_.string());
    fail_with_errno(temporary_, "renaming");
  }
  published_ = true;
  sync_directory(directory_of(target));
  if (!inside_) return;
  fault::point("mid-publish");
  move_out(target, path_);
}

void remove_interrupted_outputs(const fs::path& folder) {
  for (const fs::path& temporary : temporaries_in(folder, ""))
    if (Descriptor descriptor; try_lock(temporary, descriptor) == LockState::held) remove_interrupted(temporary);
}

void write_new_directory(const fs::path& path, const std::function<void(const fs::path&)>& fill) {
  PendingOutput output(path);
  fill(output.place());
  output.publish();
}

void write_shared_text(const fs::path& path, std::string_view text) {
  PendingOutput output(path, PendingOutput::Kind::shared_file);
  write_text(output.place(), text);
  output.publish();
}

}  // namespace weft::storage
