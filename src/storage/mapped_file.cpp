// SPDX-License-Identifier: Apache-2.0
#include "storage/mapped_file.hpp"

#include <sys/mman.h>
#include <sys/stat.h>

#include "base/error.hpp"

namespace weft::storage {

MappedFile::MappedFile(const std::string& path) : path_(path), descriptor_(open_regular(path, ExitCode::data)) {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail_with_errno(path, "reading the size");
  if (status.st_size == 0) throw error(ExitCode::data, "{}: is empty; was it written completely?", path);
  modified_ = status.st_mtim.tv_sec * std::int64_t{1'000'000'000} + status.st_mtim.tv_nsec;
  size_ = static_cast<std::size_t>(status.st_size);
  void* const data = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor_, 0);
  if (data == MAP_FAILED) fail_with_errno(path, "mapping into memory");
  data_ = data;
}

MappedFile::~MappedFile() { ::munmap(data_, size_); }

void MappedFile::require_whole() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail_with_errno(path_, "reading the size");
  if (static_cast<std::size_t>(status.st_size) < size_)
    throw error(ExitCode::data, "{}: has {} bytes (it had {} when it was opened); was it changed?", path_,
                status.st_size, size_);
}

}  // namespace weft::storage
