// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <numeric>
#include <vector>

#include "base/error.hpp"
#include "base/file.hpp"
#include "storage/checksum.hpp"
#include "storage/digest.hpp"
#include "storage/durable.hpp"
#include "storage/posix_file.hpp"
#include "storage/tensor_file.hpp"
#include "tests/test.hpp"

namespace {

std::mutex mutex;
std::vector<std::string> synced;

}  // namespace

/// In place of that of the C library: also records what is synced.
extern "C" int fsync(int descriptor) {
  {
    const std::lock_guard lock(mutex);
    std::error_code none;
    synced.push_back(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor), none));
  }
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

namespace weft::storage {
namespace fs = std::filesystem;
namespace {

/// A temporary directory.
struct Scratch {
  fs::path path;
  Scratch() {
    std::string pattern = (fs::temp_directory_path() / "weft_files_XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path = pattern;
  }
  ~Scratch() { fs::remove_all(path); }
};

}  // namespace

TEST_CASE("only regular files are read, and nothing else is waited for") {
  const Scratch scratch;
  write_text(scratch.path / "file", "text");
  fs::create_symlink("file", scratch.path / "link");
  CHECK(read_text(scratch.path / "link", 10) == "text");
  CHECK(PosixFile((scratch.path / "link").string()).bytes() == 4);
  REQUIRE(::mkfifo((scratch.path / "fifo").c_str(), 0600) == 0);
  fs::create_symlink("fifo", scratch.path / "link_to_fifo");
  for (const char* name : {"fifo", "link_to_fifo"}) {
    const fs::path path = scratch.path / name;
    const std::string message = path.string() + ": is a FIFO (only regular files are read)";
    CHECK_THROWS_WITH_AS(open_regular(path), message.c_str(), Error);
    CHECK_THROWS_AS(read_text(path, 10), Error);
    CHECK_THROWS_AS(PosixFile(path.string()), Error);
    CHECK_THROWS_AS(sync_file(path), Error);
  }
  CHECK_THROWS_WITH_AS(open_regular("/dev/null"), "/dev/null: is a device (only regular files are read)", Error);
  CHECK_THROWS_AS(open_regular(scratch.path), Error);
  CHECK_THROWS_AS(open_regular(scratch.path / "absent"), Error);
}

TEST_CASE("a file of a run is not written through a symbolic link") {
  const Scratch scratch;
  const fs::path target = scratch.path / "target", link = scratch.path / "link";
  write_text(target, "precious");
  const auto plant = [&](const fs::path& path) {
    fs::remove(path);
    fs::create_symlink("target", path);
  };
  plant(link);
  for (const int flags : {O_WRONLY | O_CREAT | O_APPEND, O_RDWR | O_CREAT, O_WRONLY | O_CREAT | O_TRUNC})
    CHECK_THROWS_WITH_AS(
        open_own(link, flags),
        (link.string() + ": is a symbolic link (a run does not write through links); remove it").c_str(), Error);
  // A file that is written as a whole replaces the link.
  write_text(link, "new");
  CHECK(!fs::is_symlink(link));
  plant(scratch.path / "other.tmp");
  write_text_atomically(scratch.path / "other", "new");
  CHECK(read_text(scratch.path / "other", 10) == "new");
  CHECK(read_text(target, 10) == "precious");
}

TEST_CASE("directories are created with their parents, each synced in the one that holds it") {
  const Scratch scratch;
  synced.clear();
  make_directory(scratch.path / "a" / "b" / "c" / "");
  CHECK(fs::is_directory(scratch.path / "a" / "b" / "c"));
  CHECK(synced == std::vector<std::string>{scratch.path, scratch.path / "a", scratch.path / "a" / "b"});
  synced.clear();
  make_directory(scratch.path / "a");  // it may have been created by a process that was killed before it synced
  CHECK(synced == std::vector<std::string>{scratch.path});
  make_directory(scratch.path / "a");
  make_directory("/");
  write_text(scratch.path / "file", "");
  CHECK_THROWS(make_directory(scratch.path / "file" / "d"));
}

TEST_CASE("sha256 gives the digests of FIPS 180-4") {
  CHECK(sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

TEST_CASE("digests of segments do not depend on the number of threads") {
  const Scratch scratch;
  const fs::path path = scratch.path / "data";
  const std::string one(static_cast<std::size_t>(kDigestSegment), 'a'), rest = "abc";
  write_text(path, one + rest);
  const std::int64_t bytes = kDigestSegment + 3;
  REQUIRE(digest_segments(bytes) == 2);
  for (const int threads : {1, 3}) {
    const auto digests = sha256_segments(path, bytes, 0, 2, threads);
    REQUIRE(digests.size() == 2);
    CHECK(digests[0] == sha256(one));
    CHECK(digests[1] == sha256(rest));
  }
  CHECK(sha256_segments(path, bytes, 1, 2, 2) == std::vector<std::string>{sha256(rest)});
  CHECK_THROWS_AS(sha256_segments(path, bytes + 1, 0, 2, 2), Error);
  CHECK_THROWS_AS(sha256_segments(scratch.path / "absent", bytes, 0, 2, 2), Error);
}

TEST_CASE("FollowingDigests gives the digests of the complete file, including metadata written on closing") {
  const Scratch scratch;
  const std::vector<std::int64_t> shape{40'000'003};  // three datasets: one complete segment and a partial one
  std::vector<unsigned char> data(static_cast<std::size_t>(shape[0]));
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>((i * 2654435761u) >> 13);
  // Metadata between the data, so that closing rewrites parts of every segment; then all metadata at the start.
  for (const std::int64_t metadata : {std::int64_t{2048}, 3 * metadata_bytes(kernels::Scalar::u8, shape)}) {
    const fs::path path = scratch.path / fmt::format("{}.h5", metadata);
    Handle file = create_file(path, metadata);
    const Writeback disk(path);
    FollowingDigests digests(path, disk);
    std::int64_t final_bytes = 0, first = kDigestSegment;
    for (const char* name : {"a", "b", "c"}) {
      Handle dataset = create_dataset(file, name, kernels::Scalar::u8, shape);
      const std::int64_t piece = piece_rows(kernels::Scalar::u8, shape);
      for (std::int64_t begin = 0; begin < shape[0]; begin += piece)
        for (const FileRange& chunk :
             write_rows(dataset, begin, std::min(piece, shape[0] - begin), data.data() + begin)) {
          digests.add_final(chunk.begin, chunk.end);
          final_bytes += chunk.end - chunk.begin;
          first = std::min(first, chunk.begin);
        }
      dataset.close();
    }
    file.close();
    const auto bytes = static_cast<std::int64_t>(fs::file_size(path));
    CHECK(final_bytes > 3 * shape[0]);
    CHECK(final_bytes < bytes);
    CHECK((first + final_bytes == bytes) == (metadata > 2048));  // all metadata at the start
    REQUIRE(digest_segments(bytes) == 2);
    CHECK(digests.finish(bytes) == sha256_segments(path, bytes, 0, 2, 2));
    disk.finish();
  }
}

TEST_CASE("FollowingDigests stops at the first error and on destruction") {
  const Scratch scratch;
  const fs::path path = scratch.path / "data";
  write_text(path, "abc");
  const Writeback disk(path);
  {
    FollowingDigests digests(path, disk);
    CHECK(digests.finish(3) == std::vector<std::string>{sha256("abc")});
  }
  {
    FollowingDigests digests(path, disk);
    CHECK_THROWS_AS(digests.finish(4), Error);
  }
  {
    FollowingDigests digests(path, disk);  // segments beyond the end of the file
    CHECK_THROWS_WITH_AS(
        [&] {
          for (std::int64_t i = 0; i < 1000; ++i) digests.add_final(i * kDigestSegment, (i + 1) * kDigestSegment);
          digests.finish(1000 * kDigestSegment);
        }(),
        doctest::Contains("truncated"), Error);
  }
  fs::resize_file(path, 1000 * kDigestSegment);  // a minute of work unless cancelled
  FollowingDigests cancelled(path, disk);
  cancelled.add_final(0, kDigestSegment);
}

TEST_CASE("text files are replaced atomically and read up to a limit") {
  const Scratch scratch;
  const fs::path path = scratch.path / "latest";
  write_text_atomically(path, "one\n");
  write_text_atomically(path, "two\n");
  CHECK(read_text(path, 4) == "two\n");
  CHECK_THROWS_AS(read_text(path, 3), Error);
  CHECK_THROWS_AS(read_text(scratch.path, 100), Error);
  CHECK(!fs::exists(scratch.path / "latest.tmp"));
  CHECK(free_bytes(scratch.path) > 0);
  CHECK_THROWS_AS(rename_durably(scratch.path / "absent", path), Error);
}

TEST_CASE("rows are read bit for bit as written, for all types, shapes and pieces") {
  const Scratch scratch;
  using kernels::Scalar;
  int n = 0;
  for (const Scalar type : {Scalar::fp32, Scalar::fp16, Scalar::bf16, Scalar::fp64, Scalar::u8, Scalar::u16,
                            Scalar::i16, Scalar::i32, Scalar::i64, Scalar::u32, Scalar::u64})
    // One value, a small matrix, rows wider than a chunk, more rows than a piece, three axes.
    for (const std::vector<std::int64_t>& shape : std::vector<std::vector<std::int64_t>>{
             {1}, {3, 770}, {3, 1'200'001}, {2, 3, 1'200'001}, {5'000'011}, {11, 3, 5}}) {
      if (shape.back() > 1'000'000 && type != Scalar::u8 && type != Scalar::bf16) continue;  // time
      const fs::path path = scratch.path / fmt::format("{}.h5", n++);
      std::int64_t row_bytes = kernels::bytes_of(type);
      for (std::size_t axis = 1; axis < shape.size(); ++axis) row_bytes *= shape[axis];
      std::vector<unsigned char> data(static_cast<std::size_t>(shape[0] * row_bytes)), back(data.size());
      for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>((i * 2654435761u) >> 13);
      {
        Handle file = create_file(path);
        Handle dataset = create_dataset(file, "group/data", type, shape);
        const std::int64_t piece = piece_rows(type, shape);
        for (std::int64_t begin = 0; begin < shape[0]; begin += piece)
          write_rows(dataset, begin, std::min(piece, shape[0] - begin), data.data() + begin * row_bytes);
        dataset.close();
        file.close();
      }
      const Handle file = open_file(path);
      const Handle dataset = open_dataset(file, "group/data", type, shape);
      require_complete(dataset, "group/data");
      read_rows(dataset, 0, shape[0], back.data());
      CHECK(data == back);
      if (shape[0] > 2) {  // rows in the middle, not aligned to chunks
        read_rows(dataset, 1, shape[0] - 2, back.data());
        CHECK(std::memcmp(back.data(), data.data() + row_bytes, static_cast<std::size_t>((shape[0] - 2) * row_bytes)) ==
              0);
      }
      // The same without HDF5's filters, for any range of rows.
      const PosixFile bytes(path.string());
      for (const std::int64_t begin : {std::int64_t{0}, shape[0] / 3, shape[0] - 1}) {
        const std::int64_t count = std::max<std::int64_t>(1, (shape[0] - begin) * 2 / 3);
        std::fill(back.begin(), back.end(), 0);
        read_rows_verified(dataset, bytes, begin, count, back.data());
        CHECK(std::memcmp(back.data(), data.data() + begin * row_bytes, static_cast<std::size_t>(count * row_bytes)) ==
              0);
      }
      CHECK_THROWS_AS(open_dataset(file, "group/other", type, shape), Error);
      CHECK_THROWS_AS(open_dataset(file, "absent/data", type, shape), Error);
      CHECK_THROWS_AS(open_dataset(file, "group/data", type == Scalar::u8 ? Scalar::i64 : Scalar::u8, shape), Error);
      std::vector<std::int64_t> longer = shape;
      ++longer[0];
      CHECK_THROWS_AS(open_dataset(file, "group/data", type, longer), Error);
    }
}

TEST_CASE("fletcher32 equals the checksum of HDF5's filter") {
  const Scratch scratch;
  const Lock lock;
  const Handle file = create_file(scratch.path / "a.h5");
  std::vector<hsize_t> sizes(200);
  std::iota(sizes.begin(), sizes.end(), hsize_t{1});
  // Sizes around the blocks of HDF5 (720 bytes) and of fletcher32 (23040 bytes), and a chunk.
  for (const hsize_t size : {719, 720, 721, 722, 23'039, 23'040, 23'041, 23'103, 23'104, 46'081, 1'048'576, 1'200'001})
    sizes.push_back(size);
  for (const int kind : {0, 1, 2})  // zeros, ones, mixed
    for (const hsize_t size : sizes) {
      std::vector<unsigned char> data(size, kind == 0 ? 0x00 : 0xff), stored(size + 4);
      if (kind == 2)
        for (std::size_t i = 0; i < size; ++i) data[i] = static_cast<unsigned char>(((i + size) * 2654435761u) >> 13);
      const Handle space(H5Screate_simple(1, &size, nullptr), H5Sclose, "space");
      const Handle create(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "properties");
      check(H5Pset_chunk(create, 1, &size), "chunk");
      check(H5Pset_fletcher32(create), "filter");
      const Handle dataset(H5Dcreate2(file, fmt::format("{}_{}", kind, size).c_str(), H5T_STD_U8LE, space, H5P_DEFAULT,
                                      create, H5P_DEFAULT),
                           H5Dclose, "dataset");
      check(H5Dwrite(dataset, H5T_STD_U8LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, data.data()), "writing");
      check(H5Dflush(dataset), "flushing");
      const hsize_t origin = 0;
      std::uint32_t mask = 0;
      check(H5Dread_chunk(dataset, H5P_DEFAULT, &origin, &mask, stored.data()), "reading");
      const std::uint32_t sum = fletcher32(data.data(), size);
      CAPTURE(kind);
      CAPTURE(size);
      CHECK(std::memcmp(stored.data() + size, &sum, 4) == 0);
    }
}

TEST_CASE("require_complete detects a chunk that was never written") {
  const Scratch scratch;
  const std::vector<std::int64_t> shape{3 * piece_rows(kernels::Scalar::u8, {20'000'000})};
  const std::vector<char> data(static_cast<std::size_t>(shape[0] / 3));
  Handle file = create_file(scratch.path / "a.h5");
  const Handle dataset = create_dataset(file, "data", kernels::Scalar::u8, shape);
  write_rows(dataset, 0, shape[0] / 3, data.data());
  CHECK_THROWS_AS(require_complete(dataset, "data"), Error);
}

}  // namespace weft::storage
