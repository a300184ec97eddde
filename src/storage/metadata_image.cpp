// SPDX-License-Identifier: Apache-2.0
#include "storage/metadata_image.hpp"

#include <algorithm>
#include <cstring>
#if H5_VERSION_GE(1, 13, 0)
#include <H5FDdevelop.h>
#endif

namespace weft::storage {
namespace {

constexpr std::int64_t kPage = 64 << 10;

}  // namespace

/// The file driver. HDF5 calls its functions under the lock of `hdf5.hpp`.
struct MetadataImage::Driver {
  H5FD_t file;  // first: HDF5 knows only this part
  MetadataImage* image;
  haddr_t allocated, written;  // ends of what has been allocated and written

  static Driver& of(H5FD_t* file) { return *reinterpret_cast<Driver*>(file); }
  static const Driver& of(const H5FD_t* file) { return *reinterpret_cast<const Driver*>(file); }

  static H5FD_t* open(const char*, unsigned, hid_t access, haddr_t) {
    const void* const info = H5Pget_driver_info(access);
    if (info == nullptr) return nullptr;
    MetadataImage* const image = *static_cast<MetadataImage* const*>(info);
    image->pages_.clear();
    image->bytes_ = 0;
    return &(new Driver{{}, image, 0, 0})->file;
  }

  // Parameters of type auto: HDF5 1 and 2 differ in the type of a truth value.
  static hid_t id() {
    static const hid_t registered = [] {
      static H5FD_class_t functions{};
#if H5_VERSION_GE(1, 13, 2)
      constexpr int kOwnNumber = 731;  // any above H5_VFD_RESERVED
      functions.version = H5FD_CLASS_VERSION;
      functions.value = static_cast<H5FD_class_value_t>(kOwnNumber);
#endif
      functions.name = "weft_metadata_image";
      functions.maxaddr = (haddr_t{1} << 63) - 1;
      functions.fc_degree = H5F_CLOSE_WEAK;
      functions.fapl_size = sizeof(MetadataImage*);  // copied with the properties
      functions.open = open;
      functions.close = [](H5FD_t* file) -> herr_t {
        of(file).image->bytes_ = static_cast<std::int64_t>(of(file).written);
        delete &of(file);
        return 0;
      };
      // The features of the default driver that change the layout.
      functions.query = [](const H5FD_t*, unsigned long* flags) -> herr_t {
        if (flags != nullptr)
          *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_AGGREGATE_SMALLDATA | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
        return 0;
      };
      functions.get_eoa = [](const H5FD_t* file, H5FD_mem_t) { return of(file).allocated; };
      functions.set_eoa = [](H5FD_t* file, H5FD_mem_t, haddr_t end) -> herr_t {
        of(file).allocated = end;
        return 0;
      };
      functions.get_eof = [](const H5FD_t* file, H5FD_mem_t) { return of(file).written; };
      functions.read = [](H5FD_t* file, H5FD_mem_t, hid_t, haddr_t at, std::size_t count, void* to) -> herr_t {
        of(file).image->copy(static_cast<std::int64_t>(at), static_cast<std::int64_t>(at + count),
                             static_cast<char*>(to));
        return 0;
      };
      functions.write = [](H5FD_t* file, H5FD_mem_t kind, hid_t, haddr_t at, std::size_t count,
                           const void* from) -> herr_t {
        try {
          if (kind != H5FD_MEM_DRAW)
            of(file).image->write(static_cast<std::int64_t>(at), static_cast<std::int64_t>(count),
                                  static_cast<const char*>(from));
        } catch (const std::bad_alloc&) {
          return -1;
        }
        of(file).written = std::max(of(file).written, at + count);
        return 0;
      };
      functions.truncate = [](H5FD_t* file, hid_t, auto) -> herr_t {
        of(file).written = of(file).allocated;
        return 0;
      };
      constexpr H5FD_mem_t kMap[] = H5FD_FLMAP_DICHOTOMY;
      std::copy(std::begin(kMap), std::end(kMap), functions.fl_map);
      return H5FDregister(&functions);
    }();
    return registered;
  }
};

Handle MetadataImage::create(const std::filesystem::path& path, std::int64_t metadata_bytes) {
  const Lock lock;
  const Handle access = creation_access(metadata_bytes);
  MetadataImage* const self = this;
  check(static_cast<herr_t>(Driver::id() < 0 ? -1 : 0), "registering a file driver");
  check(H5Pset_driver(access, Driver::id(), &self), "setting the file driver");
  return create_file(path, access);
}

void MetadataImage::write(std::int64_t begin, std::int64_t count, const char* from) {
  for (const std::int64_t end = begin + count; begin < end;) {
    const std::int64_t next = std::min(end, (begin / kPage + 1) * kPage);
    // Without memory for a page there is no page, which `copy` would read.
    std::vector<char>& page = pages_.try_emplace(begin / kPage, static_cast<std::size_t>(kPage)).first->second;
    std::memcpy(page.data() + begin % kPage, from, static_cast<std::size_t>(next - begin));
    from += next - begin;
    begin = next;
  }
}

void MetadataImage::copy(std::int64_t begin, std::int64_t end, char* to) const {
  while (begin < end) {
    const std::int64_t next = std::min(end, (begin / kPage + 1) * kPage);
    const auto count = static_cast<std::size_t>(next - begin);
    const auto page = pages_.find(begin / kPage);
    if (page == pages_.end())
      std::memset(to, 0, count);
    else
      std::memcpy(to, page->second.data() + begin % kPage, count);
    to += count;
    begin = next;
  }
}

}  // namespace weft::storage
