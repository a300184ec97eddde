# SPDX-License-Identifier: Apache-2.0
"""KISS FFT, of which Weft uses the C++ header; Spack has no recipe of it."""
from spack.package import *

try:
    from spack_repo.builtin.build_systems.generic import Package
except ImportError:  # before Spack 1.0 spack.package has the class
    pass


class Kissfft(Package):
    """A fast Fourier transform that tries to keep it simple: the C++ header kissfft.hh."""

    homepage = "https://github.com/mborgerding/kissfft"
    git = "https://github.com/mborgerding/kissfft.git"

    license("BSD-3-Clause")

    version("131.2.0", tag="131.2.0", commit="7bce4153c6bc8aba2db0e889e576f9d00505cbe1")
    version("131.1.0", tag="131.1.0", commit="8f47a67f595a6641c566087bf5277034be64f24d")

    def install(self, spec, prefix):
        mkdirp(prefix.include.kissfft)
        install("kissfft.hh", prefix.include.kissfft)
