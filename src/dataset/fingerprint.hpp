// SPDX-License-Identifier: Apache-2.0
//
// The identity of a dataset as text: digests by name, "ends:HEX,rows:HEX". A text without a name is a digest "ends",
// which was the whole fingerprint of earlier versions.
#pragma once

#include <string_view>

namespace weft::dataset {

/// True if all digests that both fingerprints have are equal, and they have one in common: a checkpoint of an earlier
/// version has fewer.
bool same_data(std::string_view fingerprint, std::string_view other);

}  // namespace weft::dataset
