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
#include <utility>

namespace weft::parallel {
namespace {

// Reserved at a time: a signal that interrupts it costs no more than this.
constexpr std::int64_t kReservedAtOnce = std::int64_t{64} << 20;

/// A file that closes itself.
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

/// Where a rank's piece can be opened, and how to tell that it is the right one.
struct Offer {
  char path[64] = "";
  std::uint64_t device = 0, number = 0;
  std::int64_t bytes = 0;
};

/// What the lowest failing rank says, on all; "" when none fails.
std::string first_failure(const Communicator& node, std::string mine) {
  std::int64_t failing = mine.empty() ? node.size() : node.rank();
  node.minimum({&failing, 1});
  return failing == node.size() ? "" : node.broadcast(std::move(mine), static_cast<int>(failing));
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
  // Where ranks see different processes under one number, the path leads anywhere: not into a pipe or a terminal.
  Descriptor file(::open(offer.path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat status {};
  if (file < 0 || ::fstat(file, &status) != 0) return Descriptor();
  if (status.st_dev == offer.device && status.st_ino == offer.number) return file;
  errno = ENOENT;
  return Descriptor();
}

/// Makes the file `bytes` long and takes the memory for all of it. Returns an errno; 0 = done.
int reserve(int file, std::int64_t bytes) {
  rlimit limit{};
  // Beyond the limit a signal would come before the error.
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && static_cast<rlim_t>(bytes) > limit.rlim_cur) return EFBIG;
  // What cannot be had is not taken for a moment either; a file system without a limit says 0 blocks.
  struct statvfs room {};
  if (::fstatvfs(file, &room) == 0 && room.f_blocks > 0 &&
      room.f_bavail < static_cast<std::uint64_t>(bytes) / room.f_frsize)
    return ENOSPC;
  for (std::int64_t begin = 0; begin < bytes;) {
    const std::int64_t some = std::min(kReservedAtOnce, bytes - begin);
    const int failed = ::posix_fallocate(file, begin, some);
    if (failed == EINTR) continue;
    if (failed != 0) return failed;
    begin += some;
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
  if (mine < 0) fails("cannot be made", errno);
  std::vector<Offer> offers(pieces_.size());
  node.all_gather(&offer, offers.data(), sizeof offer);
  std::vector<Descriptor> files(pieces_.size());
  for (std::size_t rank = 0; rank < files.size() && failure.empty(); ++rank) {
    if (rank == own_ || offers[rank].path[0] == '\0') continue;
    files[rank] = open(offers[rank]);
    if (files[rank] < 0) fails("a rank cannot open that of another", errno);
  }
  std::string refused = first_failure(node, failure);
  // Everybody has it or gives up: the name goes before there is anything in the file.
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
  return first_failure(node, failure);
}

}  // namespace weft::parallel
