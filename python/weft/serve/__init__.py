# SPDX-License-Identifier: Apache-2.0
"""weft serve: the features of a transcoder, for browsing."""
