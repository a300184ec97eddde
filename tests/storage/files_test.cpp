// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <vector>

#include "base/error.hpp"
#include "base/file.hpp"
#include "storage/checksum.hpp"
#include "storage/digest.hpp"
#include "storage/digested_file.hpp"
#include "storage/durable.hpp"
#include "storage/metadata_image.hpp"
#include "storage/posix_file.hpp"
#include "storage/tensor_file.hpp"
#include "tests/scratch.hpp"
#include "tests/storage/intercepted_calls.hpp"

namespace weft::storage {
namespace fs = std::filesystem;
namespace {

/// A temporary directory.
using weft::testing::no_locks;
using weft::testing::Scratch;
using weft::testing::synced;

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

/// Bytes [begin, end) of a test file.
void some_bytes(std::int64_t begin, std::int64_t end, char* to) {
  for (std::int64_t i = begin; i < end; ++i)
    to[i - begin] = static_cast<char>((static_cast<std::uint64_t>(i) * 2654435761u) >> 13);
}

TEST_CASE("DigestedFile holds the bytes of its source and gives their digests, with and without the page cache") {
  const Scratch scratch;
  const fs::path path = scratch.path / "data";
  // Nothing; ends inside a page, at a page, at a segment, and after one: the last page is written differently.
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{1}, std::int64_t{4096}, std::int64_t{3 * 4096 - 1},
                                   (std::int64_t{4} << 20) + 8191, kDigestSegment, kDigestSegment + 4097})
    for (const auto cache : {DigestedFile::Cache::avoid, DigestedFile::Cache::use}) {
      CAPTURE(bytes);
      DigestedFile file(path, bytes, cache);  // replaces the file of the last round
      const auto digests = file.write(3, [] { return DigestedFile::Source(some_bytes); });
      file.sync();
      CHECK((cache == DigestedFile::Cache::avoid || !file.is_direct()));
      REQUIRE(static_cast<std::int64_t>(fs::file_size(path)) == bytes);
      CHECK(digests == sha256_segments(path, bytes, 0, digest_segments(bytes), 1));
      std::vector<char> expected(static_cast<std::size_t>(bytes)), found(expected.size());
      some_bytes(0, bytes, expected.data());
      PosixFile(path.string()).read(found.data(), bytes, 0);
      CHECK(found == expected);
    }
}

TEST_CASE("DigestedFile: each segment has a source, called in order; errors are passed on") {
  const Scratch scratch;
  const std::int64_t bytes = 3 * kDigestSegment;
  std::atomic<int> sources{0};
  DigestedFile file(scratch.path / "data", bytes);
  file.write(3, [&] {
    ++sources;
    return [next = std::int64_t{-1}](std::int64_t begin, std::int64_t end, char* to) mutable {
      if (next < 0 ? begin % kDigestSegment != 0 : begin != next) throw error(ExitCode::internal, "not in order");
      next = end;
      std::memset(to, 1, static_cast<std::size_t>(end - begin));
    };
  });
  CHECK(sources == 3);

  DigestedFile failing(scratch.path / "failing", bytes);
  const auto write = [&] {
    failing.write(3, [] {
      return [](std::int64_t begin, std::int64_t end, char* to) {
        if (begin >= kDigestSegment) throw error(ExitCode::numeric, "not finite");
        std::memset(to, 1, static_cast<std::size_t>(end - begin));
      };
    });
  };
  CHECK_THROWS_WITH_AS(write(), "not finite", Error);
}

TEST_CASE("MetadataImage: a file completed with its chunks has the bytes that HDF5 writes") {
  const Scratch scratch;
  using kernels::Scalar;
  const std::vector<std::int64_t> wide{7, 400'001}, small{5}, rows{3'000, 123};
  const auto describe = [&](const Handle& file) {
    write_attribute(file, "format", "test");
    write_attribute(file, "step", std::int64_t{7});
  };
  std::vector<char> numbers(7 * 400'001);
  some_bytes(0, static_cast<std::int64_t>(numbers.size()), numbers.data());
  // All metadata at the start; metadata between the data.
  for (const std::int64_t metadata : {std::int64_t{1} << 16, std::int64_t{2048}}) {
    CAPTURE(metadata);
    const fs::path path = scratch.path / fmt::format("{}.h5", metadata);
    MetadataImage image;
    std::vector<StoredChunk> chunks;
    {
      Handle file = create_file(path, metadata), described = image.create(path, metadata);
      for (const Handle* one : {&file, &described}) describe(*one);
      for (const auto& [name, shape] :
           {std::pair("a/wide", wide), std::pair("small", small), std::pair("a/rows", rows)}) {
        write_tensor(file, name, Scalar::u8, shape, numbers.data());
        Handle dataset = create_dataset(described, name, Scalar::u8, shape);
        for (const StoredChunk& chunk : allocate_chunks(dataset)) chunks.push_back(chunk);
        dataset.close();
      }
      file.close();
      described.close();
    }
    std::vector<char> written(fs::file_size(path)), completed(static_cast<std::size_t>(image.bytes()));
    REQUIRE(written.size() == completed.size());
    PosixFile(path.string()).read(written.data(), image.bytes(), 0);
    image.copy(0, image.bytes(), completed.data());
    for (const StoredChunk& chunk : chunks) {
      char* const to = completed.data() + chunk.at;
      const auto summed = static_cast<std::size_t>(chunk.stored - kChunkSumBytes);
      CHECK(std::all_of(to, to + chunk.stored, [](char byte) { return byte == 0; }));  // no raw data in the image
      std::memcpy(to, numbers.data() + chunk.begin, static_cast<std::size_t>(chunk.used));
      const std::uint32_t sum = fletcher32(to, summed);
      std::memcpy(to + summed, &sum, sizeof sum);
    }
    CHECK(completed == written);
    // Any part of the image.
    std::vector<char> part(1000);
    for (const std::int64_t begin : {std::int64_t{0}, std::int64_t{65'000}, image.bytes() - 1000}) {
      image.copy(begin, begin + 1000, part.data());
      std::vector<char> whole(static_cast<std::size_t>(image.bytes()));
      image.copy(0, image.bytes(), whole.data());
      CHECK(std::equal(part.begin(), part.end(), whole.begin() + begin));
    }
  }
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
  fs::create_directory(scratch.path / "folder");
  CHECK_THROWS_AS(write_text_atomically(scratch.path / "folder", "text"), Error);
  CHECK(!fs::exists(scratch.path / "folder.tmp"));
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
      const auto size = static_cast<std::int64_t>(fs::file_size(path));
      std::vector<BlockTag> tags;
      sha256_segments(path, size, 0, digest_segments(size), 1, &tags);
      const VerifiedFile verified(path, size, tags);
      // HDF5 finds all chunks in a copy of the whole file, and cannot read zeros as metadata.
      const Handle copy = verified.open_hdf5(size);
      const Handle copied = open_dataset(copy, "group/data", type, shape);
      for (const std::int64_t begin : {std::int64_t{0}, shape[0] / 3, shape[0] - 1}) {
        const std::int64_t count = std::max<std::int64_t>(1, (shape[0] - begin) * 2 / 3);
        std::fill(back.begin(), back.end(), 0);
        verified.read(locate_rows(copied, begin, count, back.data()));
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

TEST_CASE("bytes that change after the digests were verified are not used") {
  const Scratch scratch;
  const fs::path path = scratch.path / "a.h5";
  const std::vector<std::int64_t> shape{9'000'001};
  std::vector<unsigned char> data(static_cast<std::size_t>(shape[0]), 7), back(data.size());
  {
    Handle file = create_file(path, 4096 + metadata_bytes(kernels::Scalar::u8, shape));
    Handle dataset = create_dataset(file, "data", kernels::Scalar::u8, shape);
    const std::int64_t piece = piece_rows(kernels::Scalar::u8, shape);
    for (std::int64_t begin = 0; begin < shape[0]; begin += piece)
      write_rows(dataset, begin, std::min(piece, shape[0] - begin), data.data() + begin);
    dataset.close();
    file.close();
  }
  const auto size = static_cast<std::int64_t>(fs::file_size(path));
  std::vector<BlockTag> tags;
  const auto digests = sha256_segments(path, size, 0, 1, 2, &tags);
  REQUIRE(static_cast<std::int64_t>(tags.size()) == tagged_blocks(size));
  const VerifiedFile verified(path, size, tags);
  // All metadata is in the first block: HDF5 needs no other.
  const auto read = [&] {
    const Handle file = verified.open_hdf5(1);
    const Handle dataset = open_dataset(file, "data", kernels::Scalar::u8, shape);
    verified.read(locate_rows(dataset, 0, shape[0], back.data()));
  };
  read();
  CHECK(back == data);
  for (const std::int64_t at : {std::int64_t{0}, std::int64_t{100}, size / 2, size - 1}) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const int byte = file.get();
    file.seekp(at).put(static_cast<char>(byte ^ 1)).flush();
    CHECK_THROWS_WITH_AS(read(), doctest::Contains("after it was verified"), Error);
    file.seekp(at).put(static_cast<char>(byte)).flush();
  }
  read();
  CHECK(back == data);
}

TEST_CASE("links and files that are not regular are not followed") {
  const Scratch scratch;
  const std::vector<std::int64_t> shape{3};
  const std::vector<std::int64_t> numbers{1, 2, 3};
  for (const char* name : {"other", "shard"}) {
    Handle file = create_file(scratch.path / name);
    Handle dataset = create_dataset(file, "group/data", kernels::Scalar::i64, shape);
    write_rows(dataset, 0, 3, numbers.data());
    dataset.close();
    file.close();
  }
  {
    const Lock lock;
    const Handle file(H5Fopen((scratch.path / "shard").c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose, "opening");
    const std::string other = (scratch.path / "other").string();
    check(H5Lcreate_soft("/group/data", file, "soft", H5P_DEFAULT, H5P_DEFAULT), "linking");
    check(H5Lcreate_soft("/group", file, "soft_group", H5P_DEFAULT, H5P_DEFAULT), "linking");
    check(H5Lcreate_external(other.c_str(), "/group/data", file, "external", H5P_DEFAULT, H5P_DEFAULT), "linking");
    check(H5Lcreate_external(other.c_str(), "/group", file, "external_group", H5P_DEFAULT, H5P_DEFAULT), "linking");
    // A dataset whose numbers are in another file.
    const hsize_t extent = 3;
    const Handle space(H5Screate_simple(1, &extent, nullptr), H5Sclose, "space");
    const Handle create(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "properties");
    check(H5Pset_external(create, other.c_str(), 0, 24), "external storage");
    const Handle dataset(H5Dcreate2(file, "stored_elsewhere", H5T_STD_I64LE, space, H5P_DEFAULT, create, H5P_DEFAULT),
                         H5Dclose, "dataset");
  }
  const Handle file = open_file(scratch.path / "shard");
  CHECK_NOTHROW(open_dataset(file, "group/data", kernels::Scalar::i64, shape));
  for (const char* name : {"soft", "soft_group/data", "external", "external_group/data"})
    CHECK_THROWS_WITH_AS(open_dataset(file, name, kernels::Scalar::i64, shape),
                         doctest::Contains("links are not followed"), Error);
  CHECK_THROWS_WITH_AS(open_dataset(file, "stored_elsewhere", kernels::Scalar::i64, shape),
                       doctest::Contains("not chunked"), Error);
  const fs::path pipe = scratch.path / "pipe";
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  CHECK_THROWS_WITH_AS(open_file(pipe), doctest::Contains("only regular files"), Error);  // does not wait for a writer
}

TEST_CASE("HDF5 files are created and read on a file system without locks") {
  const Scratch scratch;
  struct Without {
    Without() { no_locks = true; }
    ~Without() { no_locks = false; }
  } without;
  const std::vector<std::int64_t> numbers{1, 2, 3};
  Handle file = create_file(scratch.path / "a.h5");
  Handle dataset = create_dataset(file, "data", kernels::Scalar::i64, {3});
  write_rows(dataset, 0, 3, numbers.data());
  dataset.close();
  file.close();
  CHECK_NOTHROW(open_file(scratch.path / "a.h5"));
  CHECK_NOTHROW(open_data_file(scratch.path / "a.h5"));
  // With the default properties HDF5 locks the file.
  const Lock lock;
  if (const hid_t locked = H5Fopen((scratch.path / "a.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT); locked >= 0) {
    MESSAGE("this HDF5 does not lock files (HDF5_USE_FILE_LOCKING, or how it was built)");
    H5Fclose(locked);
  } else {
    CHECK_THROWS_WITH_AS(Handle(locked, H5Fclose, "opening"), doctest::Contains("No locks available"), SystemError);
  }
}

TEST_CASE("a file that HDF5 cannot make sense of is damaged data, a failed system call is not") {
  const Scratch scratch;
  std::ofstream(scratch.path / "text.h5") << std::string(1000, 'x');
  CHECK_THROWS_WITH_AS(open_data_file(scratch.path / "text.h5"), doctest::Contains("is the file truncated?"), Error);
  try {
    with_damage_as_data_error("a", [] { throw SystemError(ExitCode::io, EIO, "reading failed"); });
  } catch (const Error& failure) {
    CHECK(failure.code() == ExitCode::io);
  }
  try {
    with_damage_as_data_error("a", [] { throw error(ExitCode::io, "it needs a newer HDF5"); });
  } catch (const Error& failure) {
    CHECK(failure.code() == ExitCode::data);
    CHECK(std::string(failure.what()) == "a: it needs a newer HDF5");
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
#if H5_VERSION_GE(2, 0, 0)
      std::size_t room = stored.size();
      check(H5Dread_chunk2(dataset, H5P_DEFAULT, &origin, &mask, stored.data(), &room), "reading");
#else
      check(H5Dread_chunk(dataset, H5P_DEFAULT, &origin, &mask, stored.data()), "reading");
#endif
      const std::uint32_t sum = fletcher32(data.data(), size);
      Fletcher32 in_parts;  // also inside a word
      for (std::size_t at = 0, part = 1; at < size; at += part, part = 3 * part + 2)
        in_parts.add(data.data() + at, std::min<std::size_t>(part, size - at));
      CHECK(in_parts.value() == sum);
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
