// SPDX-License-Identifier: Apache-2.0
//
// Token files: what is read from good ones, and that each kind of bad one is refused with its place.
#include "dataset/tokens/token_set.hpp"

#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>

#include "dataset/tokens/token_writer.hpp"
#include "storage/hdf5.hpp"
#include "storage/token_file.hpp"
#include "tests/scratch.hpp"

namespace weft::dataset {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<std::uint32_t>;

using Folder = testing::Scratch;

Ids counting(std::size_t n) {
  Ids ids(n);
  std::iota(ids.begin(), ids.end(), 0u);
  return ids;
}

Ids all_of(const TokenSet& set) {
  Ids ids(static_cast<std::size_t>(set.size()));
  set.read(0, ids);
  return ids;
}

void write(const std::string& path, const Ids& ids, std::int64_t vocabulary,
           const std::vector<std::int64_t>& documents = {0}, const std::string& tokenizer = "") {
  storage::write_token_file(path, ids, documents, vocabulary, 10, tokenizer);
}

/// A token file of llm.c.
template <class Id>
void write_foreign(const std::string& path, std::int32_t magic, std::int32_t version, const std::vector<Id>& ids) {
  std::vector<std::int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = static_cast<std::int32_t>(ids.size());
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(header.data()), 1024);
  file.write(reinterpret_cast<const char*>(ids.data()), static_cast<std::streamsize>(ids.size() * sizeof(Id)));
}

/// Replaces a dataset of a token file by one that `create` makes.
void replace_dataset(const std::string& path, const char* name, const std::function<void(hid_t file)>& create) {
  const storage::Lock lock;
  const storage::Handle file(H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose, "opening");
  storage::check(H5Ldelete(file, name, H5P_DEFAULT), "deleting");
  create(file);
}

/// A dataset of n zeros of a type, in chunks if `chunk` > 0.
void make_dataset(hid_t file, const char* name, hid_t type, hsize_t n, hsize_t chunk = 0, int rank = 1) {
  const hsize_t extent[] = {n, 1};
  const storage::Handle space(H5Screate_simple(rank, extent, nullptr), H5Sclose, "space");
  const storage::Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "properties");
  if (chunk > 0) storage::check(H5Pset_chunk(creation, 1, &chunk), "chunk");
  const storage::Handle dataset(H5Dcreate2(file, name, type, space, H5P_DEFAULT, creation, H5P_DEFAULT), H5Dclose,
                                "dataset");
  const std::vector<char> zeros(n * 8, 0);
  if (n > 0) storage::check(H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, zeros.data()), "writing");
}

std::string refusal_of(const std::string& path) {
  return testing::refusal(ExitCode::data, [&] { TokenSet::open(path); });
}

}  // namespace

TEST_CASE("ids of 16 and 32 bits, the tokeniser and the documents come back") {
  const Folder folder;
  write(folder / "narrow.h5", {0, 65535, 7}, 65536, {0, 2}, "{\"a\": 1}");
  const TokenSet narrow = TokenSet::open(folder / "narrow.h5");
  CHECK(all_of(narrow) == Ids{0, 65535, 7});
  CHECK(narrow.vocabulary() == 65536);
  CHECK(narrow.tokenizer() == "{\"a\": 1}");
  CHECK(narrow.text_bytes() == 10);
  CHECK(fs::file_size(folder / "narrow.h5") < 16384);
  write(folder / "wide.h5", {0, 65536, 7}, 65537);
  CHECK(all_of(TokenSet::open(folder / "wide.h5")) == Ids{0, 65536, 7});
}

TEST_CASE("files of a directory are one stream in the order of their names; parts of it are sets") {
  const Folder folder;
  fs::create_directory(folder / "set");
  write(folder / "set/b.h5", {4, 5}, 10);
  write(folder / "set/a.hdf5", {1, 2, 3}, 10, {0, 1});
  write(folder / "set/c.h5", {6}, 10);
  std::ofstream(folder / "set/tokenizer.json") << "{}";
  const TokenSet set = TokenSet::open(folder / "set");
  CHECK(set.n_files() == 3);
  CHECK(all_of(set) == Ids{1, 2, 3, 4, 5, 6});
  Ids two(2);
  set.read(2, two);
  CHECK(two == Ids{3, 4});
  CHECK(all_of(set.part(2, 6, 0)) == Ids{3, 4, 5, 6});
  CHECK(all_of(set.part(2, 6, 0).part(1, 3, 0)) == Ids{4, 5});
  std::vector<std::int64_t> starts;
  set.document_starts(0, 6, starts);
  CHECK(starts == std::vector<std::int64_t>{1, 3, 5});  // files begin documents
  set.check();
}

TEST_CASE("which ids count: of files that say so, of others all; damaged marks are refused") {
  const Folder folder;
  fs::create_directory(folder / "set");
  const auto write_marked = [&](const char* name, std::vector<std::uint8_t> counted) {
    storage::write_token_file(folder / name, Ids{1, 2, 3}, std::vector<std::int64_t>{0}, 10, 0, "", counted);
  };
  write_marked("set/a.h5", {0, 1, 0});
  write_marked("set/b.h5", {});
  const TokenSet set = TokenSet::open(folder / "set");
  CHECK(set.has_counted());
  std::vector<std::uint8_t> counted(5);
  set.read_counted(1, counted);
  CHECK(counted == std::vector<std::uint8_t>{1, 0, 1, 1, 1});
  set.part(2, 4, 0).read_counted(0, std::span(counted).first(2));
  CHECK(counted[0] == 0);
  CHECK(counted[1] == 1);
  set.check();
  const TokenSet all = set.counting_all();
  CHECK(!all.has_counted());
  all.part(0, 3, 0).read_counted(0, std::span(counted).first(1));
  CHECK(counted[0] == 1);
  // The marks are a part of the fingerprint.
  write_marked("a.h5", {0, 1, 1});
  write_marked("b.h5", {1, 1, 0});
  fs::create_directory(folder / "other");
  fs::copy_file(folder / "a.h5", folder / "other/b.h5");
  CHECK(TokenSet::open(folder / "other/b.h5").fingerprint() != TokenSet::open(folder / "b.h5").fingerprint());

  write_marked("bad.h5", {0, 2, 1});
  const TokenSet bad = TokenSet::open(folder / "bad.h5");
  CHECK(testing::refusal(ExitCode::data, [&] { bad.check(); }).find("bad.h5: /counted [1] is 2") != std::string::npos);
  write_marked("short.h5", {1, 0});
  CHECK(refusal_of(folder / "short.h5").find("/counted has 2 entries for 3 tokens") != std::string::npos);

  TokenWriter writer(folder / "written", 10, "{}", 4);
  writer.append(Ids{1, 2, 3}, 3, std::vector<std::uint8_t>{0, 0, 1});
  writer.append(Ids{4, 5}, 2);
  writer.append(Ids{6, 7, 8}, 3, std::vector<std::uint8_t>{1, 1, 0});
  CHECK(writer.finish().files == 2);
  counted.resize(8);
  TokenSet::open(folder / "written").read_counted(0, counted);
  CHECK(counted == std::vector<std::uint8_t>{0, 0, 1, 1, 1, 1, 1, 0});
}

TEST_CASE("token files of llm.c are read; their documents begin with a fixed id") {
  const Folder folder;
  write_foreign<std::uint16_t>(folder / "gpt2.bin", 20240520, 1, {50256, 5, 6, 50256, 7});
  const TokenSet gpt2 = TokenSet::open(folder / "gpt2.bin");
  CHECK(all_of(gpt2) == Ids{50256, 5, 6, 50256, 7});
  CHECK(gpt2.vocabulary() == 50257);
  std::vector<std::int64_t> starts;
  gpt2.document_starts(0, 5, starts);
  CHECK(starts == std::vector<std::int64_t>{3});
  write_foreign<std::uint32_t>(folder / "llama3.bin", 20240801, 7, {128000, 100000});
  CHECK(TokenSet::open(folder / "llama3.bin").vocabulary() == 128256);
  CHECK(all_of(TokenSet::open(folder / "llama3.bin")) == Ids{128000, 100000});
  CHECK(is_token_file(folder / "llama3.bin"));
  fs::rename(folder / "llama3.bin", folder / "noname");
  CHECK(is_token_file(folder / "noname"));
}

TEST_CASE("an id out of range is found when it is read, with its file and position") {
  const Folder folder;
  fs::create_directory(folder / "set");
  write(folder / "set/0.h5", counting(100), 100);
  Ids ids = counting(3000);
  ids[2000] = 70000;
  write(folder / "set/1.h5", ids, 70001);
  CHECK(refusal_of(folder / "set").find("were two sets mixed?") != std::string::npos);
  fs::remove(folder / "set/1.h5");
  write_foreign<std::uint16_t>(folder / "bad.bin", 20240520, 1, {1, 2, 50257, 3});
  const TokenSet set = TokenSet::open(folder / "bad.bin");
  Ids two(2);
  set.read(0, two);
  CHECK(two == Ids{1, 2});
  CHECK(testing::refusal(ExitCode::data, [&] { set.read(1, two); }) ==
        (folder / "bad.bin") + ": token 2 is 50257 (the vocabulary has 50257); was it written with another tokeniser?");
  CHECK(testing::refusal(ExitCode::data, [&] { set.check(); }).find("token 2 is 50257") != std::string::npos);
}

TEST_CASE("damaged and unsuitable files are refused") {
  const Folder folder;
  const std::string path = folder / "f.h5";
  const auto after = [&](const std::function<void()>& change) {
    fs::remove(path);
    write(path, counting(1000), 1000, {0, 10, 20});
    change();
    return refusal_of(path);
  };
  const auto contains = [](const std::string& text, const std::string& part) {
    INFO(text);
    return text.find(part) != std::string::npos;
  };
  write(path, counting(1000), 1000, {0, 10, 20});
  CHECK_NOTHROW(TokenSet::open(path));
  CHECK(contains(after([&] { fs::resize_file(path, 0); }), "f.h5: is empty"));
  CHECK(contains(after([&] { fs::resize_file(path, 1500); }), "f.h5: cannot be opened"));
  CHECK(contains(after([&] { std::ofstream(path) << "some text"; }), "f.h5: cannot be opened"));
  const auto dataset = [&](const char* name, hid_t type, hsize_t n, hsize_t chunk = 0, int rank = 1) {
    return after(
        [&] { replace_dataset(path, name, [&](hid_t file) { make_dataset(file, name, type, n, chunk, rank); }); });
  };
  CHECK(contains(dataset("tokens", H5T_STD_U16LE, 1000, 100), "/tokens is not stored contiguously"));
  CHECK(contains(dataset("tokens", H5T_STD_U16LE, 1000, 100), "h5repack -f NONE -l tokens:CONTI"));
  CHECK(contains(dataset("tokens", H5T_STD_U16BE, 1000), "/tokens is uint16 big-endian (expected: uint16 or uint32)"));
  CHECK(contains(dataset("tokens", H5T_IEEE_F32LE, 1000), "/tokens is float32"));
  CHECK(contains(dataset("tokens", H5T_STD_U16LE, 0), "/tokens is empty"));
  CHECK(contains(dataset("tokens", H5T_STD_U16LE, 10, 0, 2), "/tokens has 2 dimensions"));
  CHECK(contains(dataset("documents", H5T_STD_I32LE, 1), "/documents is int32"));
  CHECK(contains(dataset("documents", H5T_STD_I64LE, 3), "/documents [1] is 0 after 0"));
  CHECK(contains(dataset("documents", H5T_STD_I64LE, 2000), "/documents has 2000 entries for 1000 tokens"));
  CHECK(contains(after([&] { replace_dataset(path, "tokens", [](hid_t) {}); }), "/tokens is missing"));
  CHECK(contains(after([&] {
                   replace_dataset(path, "tokens", [](hid_t file) {
                     storage::check(
                         H5Lcreate_external("/etc/x.h5", "/tokens", file, "tokens", H5P_DEFAULT, H5P_DEFAULT), "link");
                   });
                 }),
                 "/tokens is an external or soft link"));
  const auto attribute = [&](const char* name, std::int64_t value) {
    return after([&] {
      const storage::Lock lock;
      const storage::Handle file(H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose, "opening");
      storage::check(H5Adelete(file, name), "deleting");
      storage::write_attribute(file, name, value);
    });
  };
  CHECK(contains(attribute("format_version", 3), "format_version is 3 (this program reads up to 2)"));
  CHECK(contains(attribute("vocabulary", 0), "attribute vocabulary is 0"));
  CHECK(contains(attribute("vocabulary", std::int64_t{1} << 31), "attribute vocabulary is 2147483648"));
  CHECK(contains(attribute("text_bytes", -1), "attribute text_bytes is -1"));
  CHECK(contains(attribute("format", 3), "attribute format is not a single string"));

  CHECK(contains(refusal_of(folder / "none.h5"), "none.h5: cannot be read"));
  fs::create_directory(folder / "empty");
  CHECK(contains(refusal_of(folder / "empty"), "no token files found"));
  mkfifo((folder / "fifo.h5").c_str(), 0600);
  CHECK(contains(refusal_of(folder / "fifo.h5"), "is a FIFO"));

  write_foreign<std::uint16_t>(folder / "a.bin", 20240520, 2, {1, 2});
  CHECK(contains(refusal_of(folder / "a.bin"), "begins with 20240520 2"));
  write_foreign<std::uint16_t>(folder / "b.bin", 20240520, 1, {1, 2});
  fs::resize_file(folder / "b.bin", 1026);
  CHECK(contains(refusal_of(folder / "b.bin"), "claims 2 tokens (1028 bytes with its header) and has 1026"));
  fs::resize_file(folder / "b.bin", 100);
  CHECK(contains(refusal_of(folder / "b.bin"), "has 100 bytes"));
  write_foreign<std::uint16_t>(folder / "c.bin", 20240520, 1, {});
  CHECK(contains(refusal_of(folder / "c.bin"), "claims 0 tokens"));
}

TEST_CASE("a file that becomes shorter while it is mapped is an error, not a signal") {
  const Folder folder;
  write(folder / "f.h5", Ids(100000, 3), 10);
  const TokenSet set = TokenSet::open(folder / "f.h5");
  fs::resize_file(folder / "f.h5", 4096);
  Ids ids(10);
  CHECK(testing::refusal(ExitCode::data, [&] { set.read(90000, ids); }).find("has 4096 bytes (it had") !=
        std::string::npos);
}

TEST_CASE("the fingerprint is that of the contents, not of the place") {
  const Folder folder;
  fs::create_directory(folder / "other");
  Ids ids(4'000'000, 3);
  write(folder / "f.h5", ids, 10);
  const std::string before = TokenSet::open(folder / "f.h5").fingerprint();
  fs::copy_file(folder / "f.h5", folder / "other/f.h5");
  CHECK(TokenSet::open(folder / "other/f.h5").fingerprint() == before);
  for (std::size_t i = 1'500'000; i < 2'500'000; ++i) ids[i] = 4;  // away from the ends
  fs::remove(folder / "f.h5");
  write(folder / "f.h5", ids, 10);
  CHECK(TokenSet::open(folder / "f.h5").fingerprint() != before);
}

TEST_CASE("a written set has all ids, documents and bytes, however it is divided into files") {
  const Folder folder;
  for (const std::int64_t per_file : {3, 4, 7, 100}) {
    const std::string path = folder / fmt::format("set_{}", per_file);
    TokenWriter writer(path, 100, "{}", per_file);
    writer.append(Ids{1, 2, 3}, 30);
    writer.append(Ids{}, 5);
    writer.append(Ids{4}, 10);
    CHECK(!fs::exists(path));
    writer.append(Ids{5, 6, 7, 8, 9, 10}, 60);
    const TokenWriter::Written written = writer.finish();
    CHECK(written.tokens == 10);
    CHECK(written.documents == 3);
    CHECK(written.files == (10 + per_file - 1) / per_file);
    const TokenSet set = TokenSet::open(path);
    CHECK(all_of(set) == Ids{1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
    CHECK(set.text_bytes() == 100);  // 10 per id
    CHECK(fs::exists(path + "/tokenizer.json"));
    std::vector<std::int64_t> starts, expected{3, 4};
    for (std::int64_t border = per_file; border < 10; border += per_file) expected.push_back(border);
    std::sort(expected.begin(), expected.end());
    expected.erase(std::unique(expected.begin(), expected.end()), expected.end());
    set.document_starts(0, 10, starts);
    CHECK(starts == expected);
  }
  CHECK(testing::refusal(ExitCode::usage, [&] { TokenWriter(folder / "set_3", 100, "{}"); }).find("set_3: exists") !=
        std::string::npos);
  { TokenWriter unfinished(folder / "gone", 100, "{}"); }
  CHECK(!fs::exists(folder / "gone"));
  TokenWriter nothing(folder / "nothing", 100, "{}");
  CHECK(testing::refusal(ExitCode::data, [&] { nothing.finish(); }).find("there are no tokens") != std::string::npos);
}

}  // namespace weft::dataset
