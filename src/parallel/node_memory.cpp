// SPDX-License-Identifier: Apache-2.0
#include "parallel/node_memory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "parallel/failure.hpp"

namespace weft::parallel {
namespace {

// Bytes per reservation call: an interrupting signal repeats at most this much.
constexpr std::int64_t kReservedAtOnce = std::int64_t{64} << 20;

/// A file descriptor with an owner.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  operator int() const { return number_; }

 private:
  int number_;
};

/// Where the other ranks can open a rank's piece; device and inode number identify the file.
struct Offer {
  char path[64] = "";
  std::uint64_t device = 0, number = 0;
  std::int64_t bytes = 0;
};

/// The message of the lowest failing rank, on all ranks; "" if none fails.
std::string agreed_refusal(const Communicator& node, const std::string& own) {
  const auto failure = first_failure(node, own.empty() ? std::nullopt : std::optional(Failure{ExitCode::io, own}));
  return failure ? failure->message : "";
}

Descriptor create(NodeMemory::Backing backing, Offer& offer) {
  Descriptor file;
  if (backing == NodeMemory::Backing::anonymous) {
    file = Descriptor(::memfd_create("weft", MFD_CLOEXEC));
    std::snprintf(offer.path, sizeof offer.path, "/proc/%ld/fd/%d", static_cast<long>(::getpid()), int{file});
  } else {
    std::strcpy(offer.path, "/dev/shm/weft-XXXXXX");
    file = Descriptor(::mkostemp(offer.path, O_CLOEXEC));
  }
  struct stat status {};
  if (file < 0 || ::fstat(file, &status) != 0) {
    offer.path[0] = '\0';
    return Descriptor();
  }
  offer.device = status.st_dev;
  offer.number = status.st_ino;
  return file;
}

Descriptor open(const Offer& offer) {
  // In separate process namespaces the path may name an unrelated file. Do not block on a pipe or a terminal.
  Descriptor file(::open(offer.path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat status {};
  if (file < 0 || ::fstat(file, &status) != 0) return Descriptor();
  if (status.st_dev == offer.device && status.st_ino == offer.number) return file;
  errno = ENOENT;
  return Descriptor();
}

/// Extends the file to `bytes` and reserves all of its memory. Returns an errno value; 0 on success.
int reserve(int file, std::int64_t bytes) {
  rlimit limit{};
  // Above the limit SIGXFSZ would precede the error.
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && static_cast<rlim_t>(bytes) > limit.rlim_cur) return EFBIG;
  // Check first: a failing reservation would exhaust the memory for a moment. A file system without a limit has 0
  // blocks.
  struct statvfs space {};
  if (::fstatvfs(file, &space) == 0 && space.f_blocks > 0 &&
      space.f_bavail < static_cast<std::uint64_t>(bytes) / space.f_frsize)
    return ENOSPC;
  for (std::int64_t begin = 0; begin < bytes;) {
    const std::int64_t size = std::min(kReservedAtOnce, bytes - begin);
    const int failed = ::posix_fallocate(file, begin, size);
    if (failed == EINTR) continue;
    if (failed != 0) return failed;
    begin += size;
  }
  return 0;
}

}  // namespace

NodeMemory::NodeMemory(const Communicator& node, std::int64_t own_bytes, std::initializer_list<Backing> backings)
    : own_(static_cast<std::size_t>(node.rank())), pieces_(static_cast<std::size_t>(node.size())) {
  for (const Backing backing : backings) {
    const std::string refused = share(node, own_bytes, backing);
    if (refused.empty()) {
      refusal_.clear();
      return;
    }
    unmap();
    refusal_ += (refusal_.empty() ? "" : "; ") + refused;
  }
}

NodeMemory::~NodeMemory() { unmap(); }

void NodeMemory::unmap() {
  for (Piece& piece : pieces_)
    if (piece.data != nullptr) ::munmap(std::exchange(piece.data, nullptr), piece.bytes);
}

std::string NodeMemory::share(const Communicator& node, std::int64_t own_bytes, Backing backing) {
  const char* const what = backing == Backing::anonymous ? "memfd" : "/dev/shm";
  std::string failure;
  const auto fails = [&](const char* doing, int reason) {
    if (failure.empty()) failure = fmt::format("{}: {} ({})", what, doing, std::strerror(reason));
  };
  Offer offer;
  offer.bytes = own_bytes;
  const Descriptor mine = create(backing, offer);
  if (mine < 0) fails("cannot be created", errno);
  std::vector<Offer> offers(pieces_.size());
  node.all_gather(&offer, offers.data(), sizeof offer);
  std::vector<Descriptor> files(pieces_.size());
  for (std::size_t rank = 0; rank < files.size() && failure.empty(); ++rank) {
    if (rank == own_ || offers[rank].path[0] == '\0') continue;
    files[rank] = open(offers[rank]);
    if (files[rank] < 0) fails("a rank cannot open the piece of another rank", errno);
  }
  std::string refused = agreed_refusal(node, failure);
  // All ranks have opened the file or failed to: remove its name before it contains data.
  if (mine >= 0 && backing == Backing::directory) ::unlink(offer.path);
  if (!refused.empty()) return refused;

  if (const int reason = reserve(mine, own_bytes); reason != 0)
    fails(fmt::format("{:.1f} MiB cannot be reserved", static_cast<double>(own_bytes) / (1 << 20)).c_str(), reason);
  for (std::size_t rank = 0; rank < files.size() && failure.empty(); ++rank) {
    pieces_[rank].bytes = static_cast<std::size_t>(offers[rank].bytes);
    if (pieces_[rank].bytes == 0) continue;
    void* const mapped = ::mmap(nullptr, pieces_[rank].bytes, rank == own_ ? PROT_READ | PROT_WRITE : PROT_READ,
                                MAP_SHARED, rank == own_ ? mine : files[rank], 0);
    if (mapped == MAP_FAILED)
      fails("cannot be mapped", errno);
    else
      pieces_[rank].data = mapped;
  }
  return agreed_refusal(node, failure);
}

}  // namespace weft::parallel
