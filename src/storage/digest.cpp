// SPDX-License-Identifier: Apache-2.0
#include "storage/digest.hpp"

#include <fcntl.h>
#include <openssl/evp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <optional>
#include <thread>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/progress.hpp"
#include "base/system.hpp"
#include "storage/retry.hpp"
#include "storage/threads.hpp"

namespace weft::storage {
namespace {

void require_sha256(bool good) {
  if (!good) throw error(ExitCode::internal, "libcrypto has no sha256 (is the OpenSSL configuration restricted?)");
}

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

struct Digest {
  std::string sha256;
  std::vector<BlockTag> tags;
};

/// Digest of bytes [begin, end) of a file, and tags if `tagged`; stops early if `cancelled`.
Digest digest_of(const std::filesystem::path& path, std::int64_t begin, std::int64_t end, bool tagged,
                 const std::atomic<bool>& cancelled) {
  const Descriptor file = open_regular(path);
  ::posix_fadvise(file, begin, end - begin, POSIX_FADV_WILLNEED);  // a hint: read the whole segment ahead
  std::vector<char> buffer(std::size_t{256} << 10);                // fits in the L2 cache
  Sha256 sha256;
  Digest digest;
  std::optional<Gmac> tag;
  for (std::int64_t at = begin; at < end && !cancelled;) {
    const std::int64_t block_end = std::min(end, (at / kTagBlock + 1) * kTagBlock);
    const auto wanted = std::min(static_cast<std::size_t>(block_end - at), buffer.size());
    const ssize_t got = ::pread(file, buffer.data(), wanted, at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_with_errno(path, fmt::format("reading at byte {}", at).c_str());
    if (got == 0) throw error(ExitCode::io, "{}: ends at byte {} (truncated)", path.string(), at);
    sha256.add(buffer.data(), static_cast<std::size_t>(got));
    at += got;
    if (!tagged) continue;
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

}  // namespace

Sha256::Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
  require_sha256(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
}

void Sha256::add(const void* data, std::size_t bytes) {
  require_sha256(EVP_DigestUpdate(context_.get(), data, bytes) == 1);
}

std::string Sha256::hex() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  require_sha256(EVP_DigestFinal_ex(context_.get(), digest, &size) == 1);
  std::string text;
  for (unsigned i = 0; i < size; ++i) text += fmt::format("{:02x}", digest[i]);
  return text;
}

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
  std::vector<Digest> digests(static_cast<std::size_t>(end - begin));
  std::atomic<std::int64_t> next{begin};
  std::atomic<bool> cancelled{false};
  in_parallel(std::min<std::int64_t>(threads, end - begin), [&] {
    try {
      for (std::int64_t i = next++; i < end && !cancelled; i = next++) {
        digests[static_cast<std::size_t>(i - begin)] = retried([&] {
          return digest_of(path, i * kDigestSegment, std::min(bytes, (i + 1) * kDigestSegment), tags != nullptr,
                           cancelled);
        });
        note_progress();
      }
    } catch (...) {
      cancelled = true;
      throw;
    }
  });
  std::vector<std::string> list;
  for (Digest& digest : digests) {
    list.push_back(std::move(digest.sha256));
    if (tags != nullptr) tags->insert(tags->end(), digest.tags.begin(), digest.tags.end());
  }
  return list;
}

int digest_threads() { return std::min(usable_cpus(), 4); }

}  // namespace weft::storage
