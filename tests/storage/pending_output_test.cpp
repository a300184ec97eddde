// SPDX-License-Identifier: Apache-2.0
#include "storage/pending_output.hpp"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "tests/scratch.hpp"
#include "tests/storage/intercepted_calls.hpp"

namespace weft::storage {
namespace fs = std::filesystem;
namespace {

using weft::testing::no_locks;
using weft::testing::Scratch;
using weft::testing::synced;

/// Names in a directory, sorted.
std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("an output appears when it is complete, synced, or not at all") {
  const Scratch scratch;
  const fs::path path = scratch.path / "parents" / "new";
  { const PendingOutput abandoned(path); }
  CHECK(names_in(path.parent_path()).empty());
  synced.clear();
  write_new_directory(path / "", [&](const fs::path& place) {
    fs::create_directory(place / "folder");
    testing::write_file(place / "folder" / "file", "text");
    CHECK(!fs::exists(path));
  });
  CHECK(names_in(path.parent_path()) == Names{"new"});
  CHECK(testing::contents(path / "folder" / "file") == "text");
  for (const char* const name : {"/folder/file", "/folder", ".tmp", "parents"})
    CHECK(std::any_of(synced.begin(), synced.end(), [&](const std::string& one) { return one.ends_with(name); }));
  CHECK(testing::refusal(ExitCode::usage, [&] {
          PendingOutput(path, PendingOutput::Kind::directory);
        }).find("nothing is overwritten") != std::string::npos);
  // A file is replaced.
  for (const char* const text : {"one", "two"}) {
    PendingOutput file(path / "table", PendingOutput::Kind::file);
    testing::write_file(file.place(), text);
    CHECK(names_in(path).size() > 1);
    file.publish();
  }
  CHECK(testing::contents(path / "table") == "two");
  CHECK(names_in(path) == Names{"folder", "table"});
}

TEST_CASE("a shared file is that of the last process; what an interrupted one left is removed") {
  const Scratch scratch;
  const fs::path path = scratch.path / "record.json";
  const auto pending = [&] { return std::make_unique<PendingOutput>(path, PendingOutput::Kind::shared_file); };
  fs::create_directory(scratch.path / "record.json.0123abcd.tmp");
  const auto first = pending(), second = pending();
  testing::write_file(first->place(), "first");
  testing::write_file(second->place(), "second");
  second->publish();
  CHECK(testing::contents(path) == "second");
  first->publish();
  CHECK(testing::contents(path) == "first");
  CHECK(names_in(scratch.path) == Names{"record.json"});
}

TEST_CASE("what an interrupted command left is removed, what another process or user has is not") {
  const Scratch scratch;
  const fs::path path = scratch.path / "new";
  for (const char* const name : {"new.0123abcd.tmp", "new.tmp", "new.0123abcg.tmp", "newer.0123abcd.tmp"}) {
    fs::create_directory(scratch.path / name);
    testing::write_file(scratch.path / name / "file", "text");
  }
  const Names others{"new.0123abcg.tmp", "new.tmp", "newer.0123abcd.tmp"};
  {
    const PendingOutput first(path);
    CHECK(!fs::exists(scratch.path / "new.0123abcd.tmp"));
    CHECK(testing::refusal(ExitCode::io, [&] {
            PendingOutput(path, PendingOutput::Kind::directory);
          }).find("another process is writing it") != std::string::npos);
    CHECK(fs::exists(first.place()));
    const PendingOutput other(scratch.path / "newer");  // another name
  }
  fs::create_directory_symlink(scratch.path / "new.tmp", scratch.path / "new.00000000.tmp");
  { const PendingOutput second(path); }
  CHECK(testing::contents(scratch.path / "new.tmp" / "file") == "text");
  fs::remove(scratch.path / "new.00000000.tmp");
  CHECK(names_in(scratch.path) == Names{"new.0123abcg.tmp", "new.tmp"});
  // Without locks nothing is removed, and two processes write to directories of different names: one of them ends.
  no_locks = true;
  {
    PendingOutput first(path), second(path);
    testing::write_file(first.place() / "file", "first");
    testing::write_file(second.place() / "file", "second");
    first.publish();
    CHECK(testing::refusal(ExitCode::io, [&] { second.publish(); }).find("another process") != std::string::npos);
  }
  no_locks = false;
  CHECK(testing::contents(path / "file") == "first");
  CHECK(names_in(scratch.path) == Names{"new", "new.0123abcg.tmp", "new.tmp"});
}

TEST_CASE("an output is added to a directory with other files, and completed after an interruption") {
  const Scratch scratch;
  const fs::path path = scratch.path / "data";
  const auto pending = [&] {
    return std::make_unique<PendingOutput>(path, PendingOutput::Kind::directory, Names{"a", "b"});
  };
  fs::create_directory(path);
  testing::write_file(path / "mine", "kept");
  {
    const auto output = pending();
    testing::write_file(output->place() / "a", "a");
    testing::write_file(output->place() / "b", "b");
    CHECK(output->place().parent_path() == path);
    output->publish();
  }
  CHECK(names_in(path) == Names{"a", "b", "mine"});
  CHECK(testing::refusal(ExitCode::io, pending).find("already holds a ") != std::string::npos);
  // Killed when one of two names was given.
  fs::create_directory(path / ".complete.tmp");
  fs::rename(path / "b", path / ".complete.tmp" / "b");
  CHECK(testing::refusal(ExitCode::io, pending).find("already holds a ") != std::string::npos);
  CHECK(names_in(path) == Names{"a", "b", "mine"});
  CHECK(testing::contents(path / "mine") == "kept");
  // A symbolic link to a directory stays one.
  fs::create_directory(scratch.path / "far");
  fs::create_directory_symlink(scratch.path / "far", scratch.path / "link");
  write_new_directory(scratch.path / "link",
                      [](const fs::path& place) { testing::write_file(place / "file", "text"); });
  CHECK(fs::is_symlink(scratch.path / "link"));
  CHECK(names_in(scratch.path / "far") == Names{"file"});
}

}  // namespace weft::storage
