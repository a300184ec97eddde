# SPDX-License-Identifier: Apache-2.0
"""toml++, of which Spack has a recipe since 1.0."""
from spack.package import *


class Tomlplusplus(CMakePackage):
    """A parser and writer of TOML for C++17, in headers."""

    homepage = "https://marzer.github.io/tomlplusplus/"
    git = "https://github.com/marzer/tomlplusplus.git"

    license("MIT")

    version("3.4.0", tag="v3.4.0")

    depends_on("cxx", type="build")
    depends_on("cmake@3.14:", type="build")
