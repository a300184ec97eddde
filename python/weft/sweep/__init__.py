# SPDX-License-Identifier: Apache-2.0
"""weft sweep: training at every point of a grid."""
