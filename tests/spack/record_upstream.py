# SPDX-License-Identifier: Apache-2.0
"""Writes upstream.json: the names that Weft's recipe relies on, from the recipes of spack/spack-packages.

record_upstream.py CLONE       a clone of https://github.com/spack/spack-packages with the commit to record checked out

Run manually when the recipe names a new package or Spack's own recipes have changed. Only names are recorded:
of packages, of their variants, of the values of cuda_arch, and the newest version.
"""
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import stand_in

PACKAGES = ("cli11", "cmake", "cuda", "doctest", "fmt", "hdf5", "kokkos", "lz4", "nccl", "ninja", "nlohmann-json", "openblas", "openmpi", "openssl",
            "pcre2", "py-h5py", "py-numpy", "python", "spdlog", "tomlplusplus", "zstd")
VIRTUALS = ("c", "cxx", "mpi")


def version_key(version):
    return [int(part) for part in re.findall(r"\d+", version)]


def main():
    clone = Path(sys.argv[1])
    builtin = clone / "repos" / "spack_repo" / "builtin"
    record = {"repository": "https://github.com/spack/spack-packages",
              "commit": subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip(),
              "cuda_arch_values": [], "virtuals": sorted(VIRTUALS), "packages": {}}
    for node in ast.walk(ast.parse((builtin / "build_systems" / "cuda.py").read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "cuda_arch_values":
            record["cuda_arch_values"] = list(ast.literal_eval(node.value))
    stand_in.CUDA_ARCHITECTURES = tuple(record["cuda_arch_values"])
    for name in PACKAGES:
        recipe = stand_in.Recipe(builtin / "packages" / name.replace("-", "_") / "package.py")
        versions = [arguments[0] for arguments, options in recipe.of("version") if not options.get("deprecated")]
        numbered = [version for version in versions if isinstance(version, str) and re.match(r"\d", version)]
        record["packages"][name] = {"newest": max(numbered, key=version_key), "variants": sorted(v for v in recipe.variants() if isinstance(v, str))}
    stand_in.UPSTREAM.write_text(json.dumps(record, indent=1) + "\n")


main()
