// SPDX-License-Identifier: Apache-2.0
#include "storage/digest.hpp"

#include <fcntl.h>
#include <openssl/evp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "base/error.hpp"

namespace weft::storage {
namespace {

/// One running sha256.
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
    if (!good) throw error(ExitCode::internal, "libcrypto offers no sha256 (a restricted OpenSSL configuration?)");
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

std::string segment_digest(int file, const std::filesystem::path& path, std::int64_t begin, std::int64_t end,
                           std::vector<char>& buffer) {
  Sha256 digest;
  while (begin < end) {
    const std::size_t wanted =
        static_cast<std::size_t>(std::min<std::int64_t>(end - begin, static_cast<std::int64_t>(buffer.size())));
    const ssize_t got = ::pread(file, buffer.data(), wanted, begin);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      throw error(ExitCode::io, "{}: cannot be read at byte {} ({})", path.string(), begin, std::strerror(errno));
    if (got == 0) throw error(ExitCode::io, "{}: ends at byte {} (truncated)", path.string(), begin);
    digest.add(buffer.data(), static_cast<std::size_t>(got));
    begin += got;
  }
  return digest.hex();
}

}  // namespace

std::string sha256(std::string_view bytes) {
  Sha256 digest;
  digest.add(bytes.data(), bytes.size());
  return digest.hex();
}

std::vector<std::string> sha256_segments(const std::filesystem::path& path, std::int64_t bytes, std::int64_t begin,
                                         std::int64_t end, int threads) {
  constexpr std::size_t kBuffer = std::size_t{1} << 20;
  std::vector<std::string> digests(static_cast<std::size_t>(std::max<std::int64_t>(0, end - begin)));
  if (digests.empty()) return digests;
  const File file(path);
  std::atomic<std::int64_t> next{begin};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      std::vector<char> buffer(kBuffer);
      for (std::int64_t i = next++; i < end; i = next++)
        digests[static_cast<std::size_t>(i - begin)] =
            segment_digest(file, path, i * kDigestSegment, std::min(bytes, (i + 1) * kDigestSegment), buffer);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
      next = end;
    }
  };
  std::vector<std::thread> helpers;
  const std::int64_t wanted = std::min<std::int64_t>(threads, end - begin);
  for (std::int64_t i = 1; i < wanted; ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
  return digests;
}

int digest_threads() { return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 4u)); }

}  // namespace weft::storage
