// SPDX-License-Identifier: Apache-2.0
//
// Digests of rows inside a file, chosen at random but always the same: files that were rewritten with the same shape,
// size and headers differ in them.
#pragma once

#include <cstdint>
#include <string>

#include "dataset/activations/description.hpp"
#include "parallel/world.hpp"
#include "storage/activation_file.hpp"

namespace weft::dataset {

/// Digest of the sample for the fingerprint: 64 rows of file `number`, one from each 64th of the file, in as many
/// datasets as kFingerprintReads allows for `n_files` files, at least one each. Rows are read as stored; of a
/// compressed chunk its last bytes, which depend on all of it (deflate ends with a checksum).
std::string row_sample(storage::ActivationFile&, const std::string& path, std::int64_t number, std::int64_t n_files);

/// Digest of 16 rows, for FileDescription::probe: cheap enough to be compared by every rank that opens the file.
std::string row_probe(storage::ActivationFile&, const std::string& path, std::int64_t number);

/// Throws Error(data) unless the open file has the size and the probe of its description: another mount or a copy of
/// another state on this host, or a file that was replaced since the run began.
void require_described(storage::ActivationFile&, const Description&, std::int64_t number);

/// Opens files on every rank and compares them with what rank 0 described. At most kComparedFiles, evenly spaced: a
/// Reader compares each file when it opens it. Collective. Throws Error(data), known to all ranks, with rank and host.
void require_same_files(const parallel::World&, const Description&);

}  // namespace weft::dataset
