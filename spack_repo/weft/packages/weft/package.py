# SPDX-License-Identifier: Apache-2.0
"""Weft for Spack 0.22 and later. tests/spack/real.sh installs it; tests/spack/recipe_test.py compares it with CMake."""
import os
import tempfile

import spack
from spack.package import *

try:
    from spack_repo.builtin.build_systems.cmake import CMakePackage, generator
    from spack_repo.builtin.build_systems.cuda import CudaPackage
except ImportError:  # before Spack 1.0 the classes are in spack.package
    pass


class Weft(CMakePackage, CudaPackage):
    """Weft trains cross-layer transcoders: sparse replacements of a transformer's MLPs, in which a feature read at one layer
    writes to every later layer."""

    # The clone that contains this recipe.
    git = "file://" + os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 4))

    license("Apache-2.0")

    sanity_check_is_file = [join_path("bin", "weft"), join_path("share", "bash-completion", "completions", "weft")]
    sanity_check_is_dir = [join_path("share", "weft", "inputs"), join_path("share", "weft", "jobscripts"),
                           join_path("share", "doc", "weft", "docs")]

    # Below: the tags of releases, each entered by scripts/release.sh in the commit that it tags.
    version("main", branch="main", preferred=True)

    # cuda and cuda_arch are defined by CudaPackage.
    variant("python", default=False, description="Install the Python package, py-weft, as well")

    generator("ninja")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.25:", type="build")

    depends_on("mpi")
    depends_on("hdf5@1.10:1")
    depends_on("openblas")
    depends_on("openssl")
    depends_on("pcre2@10.36: +jit")
    depends_on("utf8proc")
    depends_on("kissfft")
    depends_on("zstd")
    depends_on("lz4")
    depends_on("fmt@9:")
    depends_on("spdlog@1.10:")
    depends_on("nlohmann-json@3.11:")
    depends_on("cli11@2.1:")
    depends_on("tomlplusplus@3.3:")

    # Host: threads. GPU: CUDA as a CMake language, because nvcc_wrapper would compile every C++ file as CUDA. Kokkos is built for
    # one architecture, therefore Weft is too.
    depends_on("kokkos@4.5: +serial cxxstd=20")
    depends_on("kokkos +openmp", when="~cuda")
    if spack.spack_version_info >= (0, 23):
        depends_on("kokkos +cuda +cmake_lang ~wrapper", when="+cuda")
    else:
        conflicts("+cuda", msg="Kokkos in Spack 0.22 has no variant cmake_lang; use Spack 0.23 or later")
    for arch in CudaPackage.cuda_arch_values:
        if arch.isdigit():
            depends_on(f"kokkos cuda_arch={arch}", when=f"+cuda cuda_arch={arch}")
            depends_on(f"nccl@2.18: +cuda cuda_arch={arch}", when=f"+cuda cuda_arch={arch}")
        else:
            conflicts(f"cuda_arch={arch}", when="+cuda", msg="name the architecture by its number, as in cuda_arch=90: Kokkos knows no other name")
    depends_on("cuda@12.4:", when="+cuda")
    conflicts("cuda_arch=none", when="+cuda", msg="name the GPU's architecture, as in cuda_arch=90")

    depends_on("py-weft", type="run", when="+python")

    def cmake_args(self):
        args = [
            self.define_from_variant("WEFT_ENABLE_CUDA", "cuda"),
            # As in the release presets: the sources of a module are compiled in groups.
            self.define("CMAKE_UNITY_BUILD", True),
            # Spack's compiler wrappers select the processor; the libraries come from Spack.
            self.define("WEFT_CPU_TARGET", ""),
            self.define("WEFT_BUNDLE", ""),
        ]
        if self.spec.satisfies("+cuda"):
            args += [self.define("WEFT_ENABLE_NCCL", True),
                     self.define("CMAKE_CUDA_ARCHITECTURES", self.spec.variants["cuda_arch"].value)]
        return args

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def check_install(self):
        """spack install --test=root weft"""
        self.test_version()
        if self.spec.satisfies("~cuda"):
            self.test_quickstart()

    def test_version(self):
        """the installed program prints its name and libraries"""
        weft = Executable(join_path(self.prefix.bin, "weft"))
        check_outputs(r"^weft ", weft("--version", output=str.split, error=str.split))

    def test_quickstart(self):
        """ten steps of the shipped quickstart on small synthetic data"""
        if self.spec.satisfies("+cuda"):
            raise SkipTest("a GPU may be missing where packages are built and tested")
        weft = Executable(join_path(self.prefix.bin, "weft"))
        quickstart = join_path(self.prefix.share, "weft", "inputs", "quickstart.toml")
        small = ["--set", "synthetic.tokens=4096", "--set", "synthetic.validation_tokens=512", "--set", "run.steps=10"]
        with tempfile.TemporaryDirectory() as folder, working_dir(folder):
            weft("synth", quickstart, *small)
            out = weft("train", quickstart, "--output", "run", *small, output=str.split, error=str.split)
            check_outputs(r"trained 10 steps", out)
