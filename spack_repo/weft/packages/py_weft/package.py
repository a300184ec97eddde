# SPDX-License-Identifier: Apache-2.0
"""The Python package of Weft (weft +python). Its dependencies are those of python/pyproject.toml (tests/spack)."""
import os

from spack.package import *

try:
    from spack_repo.builtin.build_systems.python import PythonPackage
except ImportError:  # before Spack 1.0 spack.package has the class
    pass


class PyWeft(PythonPackage):
    """Reader, pages, sweeps and harvests of Weft, which trains cross-layer transcoders: weft report, weft sweep, weft serve."""

    # The clone that contains this recipe.
    git = "file://" + os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 4))

    license("Apache-2.0")

    build_directory = "python"

    version("main", branch="main", preferred=True)

    depends_on("python@3.9:", type=("build", "run"))
    depends_on("py-setuptools@61:", type="build")
    depends_on("py-wheel", type="build")
    depends_on("py-h5py@3:", type=("build", "run"))
    depends_on("py-numpy@1.20:", type=("build", "run"))
    depends_on("py-matplotlib@3.4:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type="run")
