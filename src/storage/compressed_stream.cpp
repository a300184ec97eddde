// SPDX-License-Identifier: Apache-2.0
#include "storage/compressed_stream.hpp"

#ifdef WEFT_HAVE_LZ4
#include <lz4frame.h>
#endif
#ifdef WEFT_HAVE_ZSTD
#include <zstd.h>
#endif

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/error.hpp"

namespace weft::storage {
namespace {

constexpr std::int64_t kStreamPiece = std::int64_t{1} << 18;

#ifdef WEFT_HAVE_ZSTD
struct FreeZstd {
  void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
};
#endif
#ifdef WEFT_HAVE_LZ4
struct FreeLz4 {
  void operator()(LZ4F_dctx* context) const { LZ4F_freeDecompressionContext(context); }
};
#endif

}  // namespace

std::string_view name_of(Compression compression) {
  return compression == Compression::zstd ? "zstd" : compression == Compression::lz4 ? "lz4" : "none";
}

bool can_unpack(Compression compression) {
#ifdef WEFT_HAVE_ZSTD
  if (compression == Compression::zstd) return true;
#endif
#ifdef WEFT_HAVE_LZ4
  if (compression == Compression::lz4) return true;
#endif
  return compression == Compression::none;
}

struct CompressedStream::State {
  const PosixFile& file;
  std::string what;
  std::int64_t at, end;
  Compression compression;
  std::vector<std::byte> packed;  // read from the file and not yet unpacked: [used, packed.size())
  std::size_t used = 0;
  bool frame_ended = false;  // compressed: the last frame is complete
#ifdef WEFT_HAVE_ZSTD
  std::unique_ptr<ZSTD_DStream, FreeZstd> zstd = {};
#endif
#ifdef WEFT_HAVE_LZ4
  std::unique_ptr<LZ4F_dctx, FreeLz4> lz4 = {};
#endif

  [[noreturn]] void damaged(const std::string& why) const {
    throw error(ExitCode::data, "{}: {}; is the file damaged?", what, why);
  }

  /// Reads more of the file; false at the end.
  bool refill() {
    if (used < packed.size()) return true;
    const std::int64_t n = std::min(kStreamPiece, end - at);
    packed.resize(static_cast<std::size_t>(n));
    used = 0;
    if (n > 0) file.read(packed.data(), n, at);
    at += n;
    return n > 0;
  }

  /// Unpacks at most `bytes` bytes; 0 at the end of the values.
  std::int64_t unpack(std::byte* to, std::int64_t bytes) {
    for (;;) {
      const bool more = refill();
      if (!more && frame_ended) return 0;
      std::size_t taken = packed.size() - used, made = static_cast<std::size_t>(bytes);
      const std::byte* const from = packed.data() + used;
      if (compression == Compression::none) {
        if (!more) return 0;
        taken = made = std::min(taken, made);
        std::copy_n(from, made, to);
#ifdef WEFT_HAVE_ZSTD
      } else if (compression == Compression::zstd) {
        ZSTD_inBuffer in{from, taken, 0};
        ZSTD_outBuffer out{to, made, 0};
        const std::size_t status = ZSTD_decompressStream(zstd.get(), &out, &in);
        if (ZSTD_isError(status)) damaged(fmt::format("cannot be unpacked ({})", ZSTD_getErrorName(status)));
        frame_ended = status == 0;
        taken = in.pos;
        made = out.pos;
#endif
#ifdef WEFT_HAVE_LZ4
      } else if (compression == Compression::lz4) {
        const std::size_t status = LZ4F_decompress(lz4.get(), to, &made, from, &taken, nullptr);
        if (LZ4F_isError(status) != 0) damaged(fmt::format("cannot be unpacked ({})", LZ4F_getErrorName(status)));
        frame_ended = status == 0;
#endif
      }
      used += taken;
      if (made > 0) return static_cast<std::int64_t>(made);
      if (!more && !frame_ended) damaged("its compressed values are not complete");
    }
  }
};

CompressedStream::CompressedStream(const PosixFile& file, std::string what, std::int64_t begin, std::int64_t bytes,
                                   Compression compression)
    : state_(new State{.file = file,
                       .what = std::move(what),
                       .at = begin,
                       .end = begin + bytes,
                       .compression = compression,
                       .packed = {}}) {
  if (!can_unpack(compression))
    throw error(ExitCode::usage,
                "{}: is compressed with {} (this program was built without lib{}); install it and build again",
                state_->what, name_of(compression), name_of(compression));
#ifdef WEFT_HAVE_ZSTD
  if (compression == Compression::zstd) {
    state_->zstd.reset(ZSTD_createDStream());
    if (!state_->zstd) throw error(ExitCode::internal, "zstd cannot be initialised");
  }
#endif
#ifdef WEFT_HAVE_LZ4
  if (compression == Compression::lz4) {
    LZ4F_dctx* context = nullptr;
    if (LZ4F_isError(LZ4F_createDecompressionContext(&context, LZ4F_VERSION)) != 0)
      throw error(ExitCode::internal, "lz4 cannot be initialised");
    state_->lz4.reset(context);
  }
#endif
}
CompressedStream::CompressedStream(CompressedStream&&) noexcept = default;
CompressedStream::~CompressedStream() = default;

void CompressedStream::read(void* to, std::int64_t bytes) {
  auto* out = static_cast<std::byte*>(to);
  while (bytes > 0) {
    const std::int64_t made = state_->unpack(out, bytes);
    if (made == 0) state_->damaged("has fewer values than its shape requires");
    out += made;
    bytes -= made;
  }
}

void CompressedStream::require_end() {
  std::byte value;
  if (state_->unpack(&value, 1) > 0) state_->damaged("has more values than its shape requires");
}

}  // namespace weft::storage
