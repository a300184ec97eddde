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
#include "storage/retry.hpp"

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

/// Incremental GMAC: the tag of AES-GCM for a message without text.
class Gmac {
 public:
  Gmac() : context_(EVP_CIPHER_CTX_new(), EVP_CIPHER_CTX_free) {
    static constexpr unsigned char kKey[16] = {}, kNonce[12] = {};
    require(context_ != nullptr && EVP_EncryptInit_ex(context_.get(), EVP_aes_128_gcm(), nullptr, kKey, kNonce) == 1);
  }
  void add(const void* data, std::int64_t bytes) {
    int unused = 0;
    require(EVP_EncryptUpdate(context_.get(), nullptr, &unused, static_cast<const unsigned char*>(data),
                              static_cast<int>(bytes)) == 1);
  }
  BlockTag tag() {
    BlockTag tag;
    int unused = 0;
    require(EVP_EncryptFinal_ex(context_.get(), tag.data(), &unused) == 1 &&
            EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_GCM_GET_TAG, static_cast<int>(tag.size()), tag.data()) == 1);
    return tag;
  }

 private:
  static void require(bool good) {
    if (!good) throw error(ExitCode::internal, "libcrypto has no AES-GCM (is the OpenSSL configuration restricted?)");
  }
  std::unique_ptr<EVP_CIPHER_CTX, decltype(&EVP_CIPHER_CTX_free)> context_;
};

struct Segment {
  std::int64_t index, begin, end;  ///< bytes of the file
};

struct Digest {
  std::string sha256;
  std::vector<BlockTag> tags;
};

/// Threads that digest segments in the order in which they are added.
class Team {
 public:
  /// `disk` writes digested segments of a file that is being written back to the disk; null for a complete file, of
  /// which tags are computed as well.
  Team(const std::filesystem::path& path, const Writeback* disk, std::int64_t helpers) : path_(path), disk_(disk) {
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
  std::map<std::int64_t, Digest> finish() {
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
      Digest digest = disk_ != nullptr ? digest_of(segment) : retried([&] { return digest_of(segment); });
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

  Digest digest_of(const Segment& segment) const {
    const Descriptor file = open_regular(path_);
    // A hint: read the whole segment ahead. A file that is being written is in the page cache already.
    if (disk_ == nullptr) ::posix_fadvise(file, segment.begin, kDigestSegment, POSIX_FADV_WILLNEED);
    std::vector<char> buffer(std::size_t{256} << 10);  // fits in the L2 cache
    Sha256 sha256;
    Digest digest;
    std::optional<Gmac> tag;
    for (std::int64_t at = segment.begin; at < segment.end && !cancelled_;) {
      const std::int64_t block_end = std::min(segment.end, (at / kTagBlock + 1) * kTagBlock);
      const auto wanted = std::min(static_cast<std::size_t>(block_end - at), buffer.size());
      const ssize_t got = ::pread(file, buffer.data(), wanted, at);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail_with_errno(path_, fmt::format("reading at byte {}", at).c_str());
      if (got == 0) throw error(ExitCode::io, "{}: ends at byte {} (truncated)", path_.string(), at);
      sha256.add(buffer.data(), static_cast<std::size_t>(got));
      at += got;
      if (disk_ != nullptr) continue;
      if (!tag) tag.emplace();
      tag->add(buffer.data(), got);
      if (at == block_end) {
        digest.tags.push_back(tag->tag());
        tag.reset();
      }
    }
    digest.sha256 = sha256.hex();
    return digest;
  }

  const std::filesystem::path path_;
  const Writeback* const disk_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Segment> waiting_;
  bool closed_ = false;
  std::map<std::int64_t, Digest> digests_;
  std::exception_ptr failure_;
  std::atomic<bool> cancelled_{false};
  std::vector<std::thread> helpers_;
};

Segment segment_of(std::int64_t index, std::int64_t file_bytes) {
  return {index, index * kDigestSegment, std::min(file_bytes, (index + 1) * kDigestSegment)};
}

std::vector<std::string> in_order(std::map<std::int64_t, Digest> digests, std::vector<BlockTag>* tags) {
  std::vector<std::string> list;
  for (auto& [segment, digest] : digests) {
    list.push_back(std::move(digest.sha256));
    if (tags != nullptr) tags->insert(tags->end(), digest.tags.begin(), digest.tags.end());
  }
  return list;
}

}  // namespace

std::string sha256(std::string_view bytes) {
  Sha256 digest;
  digest.add(bytes.data(), bytes.size());
  return digest.hex();
}

BlockTag tag_of(const void* data, std::int64_t bytes) {
  Gmac tag;
  tag.add(data, bytes);
  return tag.tag();
}

std::vector<std::string> sha256_segments(const std::filesystem::path& path, std::int64_t bytes, std::int64_t begin,
                                         std::int64_t end, int threads, std::vector<BlockTag>* tags) {
  if (begin >= end) return {};
  Team team(path, nullptr, std::min<std::int64_t>(threads, end - begin) - 1);
  for (std::int64_t i = begin; i < end; ++i) team.add(segment_of(i, bytes));
  return in_order(team.finish(), tags);
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
  return in_order(state_->team.finish(), nullptr);
}

int digest_threads() { return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 4u)); }

}  // namespace weft::storage
