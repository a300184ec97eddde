// SPDX-License-Identifier: Apache-2.0
#include "storage/digest.hpp"

#include <fcntl.h>
#include <openssl/evp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "base/error.hpp"
#include "base/progress.hpp"
#include "storage/durable.hpp"

namespace weft::storage {
namespace {

/// Incremental sha256.
class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    require(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }
  void add(const void* data, std::size_t bytes) { require(EVP_DigestUpdate(context_.get(), data, bytes) == 1); }
  std::string hex() {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned size = 0;
    require(EVP_DigestFinal_ex(context_.get(), digest, &size) == 1);
    std::string text;
    for (unsigned i = 0; i < size; ++i) text += fmt::format("{:02x}", digest[i]);
    return text;
  }

 private:
  static void require(bool good) {
    if (!good) throw error(ExitCode::internal, "libcrypto has no sha256 (is the OpenSSL configuration restricted?)");
  }
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

class File {
 public:
  explicit File(const std::filesystem::path& path) : descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) throw error(ExitCode::io, "{}: cannot be opened ({})", path.string(), std::strerror(errno));
  }
  File(const File&) = delete;
  ~File() { ::close(descriptor_); }
  operator int() const { return descriptor_; }

 private:
  int descriptor_;
};

struct Segment {
  std::int64_t index, begin, end;  ///< bytes of the file
};

/// Threads that digest segments in the order in which they are added.
class Team {
 public:
  /// `disk` writes digested segments back; may be null.
  Team(const std::filesystem::path& path, const Writeback* disk, std::int64_t helpers)
      : path_(path), file_(path), disk_(disk) {
    for (std::int64_t i = 0; i < helpers; ++i)
      helpers_.emplace_back([this] {
        while (const auto segment = wait_for_segment()) process(*segment);
      });
  }
  Team(const Team&) = delete;
  ~Team() {
    cancelled_ = true;
    close();
  }

  void add(const Segment& segment) {
    if (disk_ != nullptr) disk_->begin(segment.begin, segment.end);
    const std::lock_guard lock(mutex_);
    waiting_.push_back(segment);
    changed_.notify_one();
  }

  /// Digests in the calling thread while more than `allowed` segments wait. Throws the first failure of any thread.
  void help(std::size_t allowed) {
    while (const auto segment = take(allowed)) process(*segment);
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }

  /// Completes all segments and returns the digests by segment. Throws the first failure of any thread.
  std::map<std::int64_t, std::string> finish() {
    help(0);
    close();
    help(0);
    return std::move(digests_);
  }

 private:
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
      changed_.notify_all();
    }
    for (std::thread& helper : helpers_) helper.join();
    helpers_.clear();
  }

  std::optional<Segment> take(std::size_t allowed) {
    const std::lock_guard lock(mutex_);
    return front(allowed);
  }

  std::optional<Segment> wait_for_segment() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
    return front(0);
  }

  std::optional<Segment> front(std::size_t allowed) {
    if (cancelled_ || waiting_.size() <= allowed) return std::nullopt;
    const Segment segment = waiting_.front();
    waiting_.pop_front();
    return segment;
  }

  void process(const Segment& segment) {
    try {
      std::string digest = digest_of(segment);
      note_progress();
      if (disk_ != nullptr) disk_->release(segment.begin, segment.end);
      const std::lock_guard lock(mutex_);
      digests_[segment.index] = std::move(digest);
    } catch (...) {
      cancelled_ = true;
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
  }

  std::string digest_of(const Segment& segment) const {
    // A hint: read the whole segment ahead. A file that is being written is in the page cache already.
    if (disk_ == nullptr) ::posix_fadvise(file_, segment.begin, kDigestSegment, POSIX_FADV_WILLNEED);
    std::vector<char> buffer(std::size_t{256} << 10);  // fits in the L2 cache
    Sha256 digest;
    for (std::int64_t at = segment.begin; at < segment.end && !cancelled_;) {
      const auto wanted =
          static_cast<std::size_t>(std::min<std::int64_t>(segment.end - at, static_cast<std::int64_t>(buffer.size())));
      const ssize_t got = ::pread(file_, buffer.data(), wanted, at);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0)
        throw error(ExitCode::io, "{}: cannot be read at byte {} ({})", path_.string(), at, std::strerror(errno));
      if (got == 0) throw error(ExitCode::io, "{}: ends at byte {} (truncated)", path_.string(), at);
      digest.add(buffer.data(), static_cast<std::size_t>(got));
      at += got;
    }
    return digest.hex();
  }

  const std::filesystem::path path_;
  const File file_;
  const Writeback* const disk_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Segment> waiting_;
  bool closed_ = false;
  std::map<std::int64_t, std::string> digests_;
  std::exception_ptr failure_;
  std::atomic<bool> cancelled_{false};
  std::vector<std::thread> helpers_;
};

Segment segment_of(std::int64_t index, std::int64_t file_bytes) {
  return {index, index * kDigestSegment, std::min(file_bytes, (index + 1) * kDigestSegment)};
}

std::vector<std::string> in_order(std::map<std::int64_t, std::string> digests) {
  std::vector<std::string> list;
  for (auto& [segment, digest] : digests) list.push_back(std::move(digest));
  return list;
}

}  // namespace

std::string sha256(std::string_view bytes) {
  Sha256 digest;
  digest.add(bytes.data(), bytes.size());
  return digest.hex();
}

std::vector<std::string> sha256_segments(const std::filesystem::path& path, std::int64_t bytes, std::int64_t begin,
                                         std::int64_t end, int threads) {
  if (begin >= end) return {};
  Team team(path, nullptr, std::min<std::int64_t>(threads, end - begin) - 1);
  for (std::int64_t i = begin; i < end; ++i) team.add(segment_of(i, bytes));
  return in_order(team.finish());
}

/// Segments that may wait for the threads before the writer helps.
constexpr std::size_t kWaiting = 1;

struct FollowingDigests::State {
  Team team;
  std::map<std::int64_t, std::int64_t> final_bytes;  // of each segment begun
  std::set<std::int64_t> handed_out;
};

FollowingDigests::FollowingDigests(const std::filesystem::path& path, const Writeback& disk)
    : state_(new State{{path, &disk, std::max(1, digest_threads() - 1)}, {}, {}}) {}

FollowingDigests::~FollowingDigests() = default;

void FollowingDigests::add_final(std::int64_t begin, std::int64_t end) {
  while (begin < end) {
    const std::int64_t segment = begin / kDigestSegment, next = std::min(end, (segment + 1) * kDigestSegment);
    if ((state_->final_bytes[segment] += next - begin) == kDigestSegment) {
      state_->handed_out.insert(segment);
      state_->team.add(segment_of(segment, (segment + 1) * kDigestSegment));
    }
    begin = next;
  }
  state_->team.help(kWaiting);
}

std::vector<std::string> FollowingDigests::finish(std::int64_t bytes) {
  for (std::int64_t i = 0; i < digest_segments(bytes); ++i)
    if (!state_->handed_out.contains(i)) state_->team.add(segment_of(i, bytes));
  return in_order(state_->team.finish());
}

int digest_threads() { return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 4u)); }

}  // namespace weft::storage
