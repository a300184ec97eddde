// SPDX-License-Identifier: Apache-2.0
#include "storage/verified_file.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "base/error.hpp"
#include "storage/posix_file.hpp"
#include "storage/retry.hpp"
#include "storage/threads.hpp"

namespace weft::storage {
namespace {

/// Blocks that a thread reads with one descriptor.
constexpr std::size_t kBlocksAtATime = 8;

/// Zeroed memory. Pages that are never written take no space.
class Pages {
 public:
  explicit Pages(std::size_t bytes)
      : bytes_(bytes),
        memory_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (memory_ == MAP_FAILED)
      throw error(ExitCode::internal, "{} bytes of address space cannot be reserved ({})", bytes, std::strerror(errno));
  }
  Pages(const Pages&) = delete;
  ~Pages() { ::munmap(memory_, bytes_); }
  void* memory() const { return memory_; }

 private:
  std::size_t bytes_;
  void* memory_;
};

/// The pages of a file in memory, without the copies that HDF5 makes by default. Owned by the file, which HDF5 closes
/// through these functions; properties refer to it until they are closed.
struct Image {
  Pages pages;
  std::atomic<int> users{1};

  static void* memory(void* image) { return static_cast<Image*>(image)->pages.memory(); }
  static void release(void* image) {
    if (--static_cast<Image*>(image)->users == 0) delete static_cast<Image*>(image);
  }
  H5FD_file_image_callbacks_t callbacks() {
    H5FD_file_image_callbacks_t functions{};
    functions.image_malloc = [](std::size_t, H5FD_file_image_op_t operation, void* image) {
      if (operation == H5FD_FILE_IMAGE_OP_FILE_OPEN) ++static_cast<Image*>(image)->users;
      return memory(image);
    };
    functions.image_memcpy = [](void* to, const void*, std::size_t, H5FD_file_image_op_t, void*) { return to; };
    functions.image_realloc = [](void*, std::size_t, H5FD_file_image_op_t, void*) -> void* { return nullptr; };
    functions.image_free = [](void*, H5FD_file_image_op_t operation, void* image) -> herr_t {
      if (operation == H5FD_FILE_IMAGE_OP_FILE_CLOSE) release(image);
      return 0;
    };
    functions.udata_copy = [](void* image) {
      ++static_cast<Image*>(image)->users;
      return image;
    };
    functions.udata_free = [](void* image) -> herr_t {
      release(image);
      return 0;
    };
    functions.udata = this;
    return functions;
  }
};

}  // namespace

VerifiedFile::VerifiedFile(std::filesystem::path path, std::int64_t bytes, std::vector<BlockTag> tags)
    : path_(std::move(path)), bytes_(bytes), tags_(std::move(tags)) {
  if (static_cast<std::int64_t>(tags_.size()) != tagged_blocks(bytes))
    throw error(ExitCode::internal, "{} tags for {} bytes", tags_.size(), bytes);
}

void VerifiedFile::read(std::span<const Part> parts) const {
  struct Needed {
    std::int64_t block;
    std::size_t first;  ///< the first part with bytes in it
  };
  std::vector<Needed> blocks;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].begin < 0 || parts[i].begin > bytes_ - parts[i].bytes)
      throw error(ExitCode::io, "{}: has no {} bytes at byte {}", path_.string(), parts[i].bytes, parts[i].begin);
    const std::int64_t end = parts[i].begin + parts[i].bytes;
    for (std::int64_t block = parts[i].begin / kTagBlock; block * kTagBlock < end; ++block)
      if (blocks.empty() || blocks.back().block < block) blocks.push_back({block, i});
  }
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&] {
    const auto buffer = std::make_unique_for_overwrite<char[]>(static_cast<std::size_t>(kTagBlock));
    const auto read_block = [&](const PosixFile& file, const Needed& needed) {
      const std::int64_t begin = needed.block * kTagBlock, bytes = std::min(kTagBlock, bytes_ - begin);
      file.read(buffer.get(), bytes, begin);
      if (tag_of(buffer.get(), bytes) != tags_[static_cast<std::size_t>(needed.block)])
        throw error(ExitCode::io, "{}: changed between byte {} and {} after it was verified", path_.string(), begin,
                    begin + bytes);
      for (std::size_t i = needed.first; i < parts.size() && parts[i].begin < begin + bytes; ++i) {
        const std::int64_t from = std::max(begin, parts[i].begin),
                           to = std::min(begin + bytes, parts[i].begin + parts[i].bytes);
        if (from >= to) continue;
        std::memcpy(static_cast<char*>(parts[i].to) + (from - parts[i].begin), buffer.get() + (from - begin),
                    static_cast<std::size_t>(to - from));
      }
    };
    try {
      for (std::size_t i = next.fetch_add(kBlocksAtATime); i < blocks.size() && !failed;
           i = next.fetch_add(kBlocksAtATime))
        retried([&] {
          const PosixFile file(path_.string());
          for (std::size_t n = i; n < std::min(blocks.size(), i + kBlocksAtATime); ++n) read_block(file, blocks[n]);
        });
    } catch (...) {
      failed = true;
      throw;
    }
  };
  const std::size_t items = (blocks.size() + kBlocksAtATime - 1) / kBlocksAtATime;
  in_parallel(std::min<std::int64_t>(static_cast<std::int64_t>(items), digest_threads()), work);
}

Handle VerifiedFile::open_hdf5(std::int64_t leading) const {
  static std::atomic<int> n_opened{0};
  auto* const image = new Image{Pages(static_cast<std::size_t>(bytes_))};
  const struct Release {
    Image* image;
    ~Release() { Image::release(image); }
  } release{image};
  // Whole blocks: they are read anyway.
  const Part part{0, std::min(bytes_, tagged_blocks(leading) * kTagBlock), image->pages.memory()};
  read({&part, 1});

  const Lock lock;
  const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "creating file properties");
  constexpr std::size_t kIncrement = 1 << 20;  // not used: the file does not grow
  check(H5Pset_fapl_core(access, kIncrement, false), "setting the file driver");
  H5FD_file_image_callbacks_t callbacks = image->callbacks();
  check(H5Pset_file_image_callbacks(access, &callbacks), "setting the file driver");
  check(H5Pset_file_image(access, image->pages.memory(), static_cast<std::size_t>(bytes_)), "setting the file driver");
  // HDF5 takes images of the same name for the same file.
  const std::string name = path_.string() + "#" + std::to_string(++n_opened);
  return Handle(H5Fopen(name.c_str(), H5F_ACC_RDONLY, access), H5Fclose, path_.string() + ": opening");
}

}  // namespace weft::storage
