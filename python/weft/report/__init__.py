# SPDX-License-Identifier: Apache-2.0
"""weft report: pages of runs."""
