# SPDX-License-Identifier: Apache-2.0
"""Compares the Spack recipes with what CMake searches for and with python/pyproject.toml.

recipe_test.py REPOSITORY      fails with a list of differences

The recipes are read, not executed; real.sh installs them with a Spack.
"""
import re
import sys
from pathlib import Path

# Package found by CMake -> Spack package; None: part of every system.
PACKAGES = {"MPI": "mpi", "HDF5": "hdf5", "OpenSSL": "openssl", "nlohmann_json": "nlohmann-json", "CLI11": "cli11", "Kokkos": "kokkos",
            "CUDAToolkit": "cuda", "NCCL": "nccl", "kissfft.hh": "kissfft", "Threads": None}
# Needed, but not searched for by CMake: compilers, and the Python package.
OTHERS = {"c", "cxx", "cmake", "py-weft"}
FOR_TESTS = {"doctest"}     # the recipe does not build the tests


def dependencies(path):
    """Package -> lowest version, "" for any."""
    found = {}
    for name, version in re.findall(r'depends_on\(f?"([a-z][\w-]*)(?:@([\d.]*))?', path.read_text()):
        found[name] = found.get(name) or version
    return found


def check_cmake(repository):
    """Variables and libraries of the recipe and of CMake are the same."""
    recipe = repository / "spack_repo/weft/packages/weft/package.py"
    files = [repository / "CMakeLists.txt", *(repository / "cmake").glob("Weft*.cmake"), *(repository / "kernels").rglob("CMakeLists.txt"),
             *(repository / "src").rglob("CMakeLists.txt")]
    text = "\n".join(re.sub(r"#.*", "", path.read_text()) for path in files)
    known = set(re.findall(r"\boption\((\w+)|\bset\((?=\w+\s[^)]*?\bCACHE\b)(\w+)", text))
    known = {name for pair in known for name in pair}
    given = set(re.findall(r'self\.define(?:_from_variant)?\("(WEFT_\w+)"', recipe.read_text()))
    yield from (f"cmake_args gives {name}, which CMake does not know" for name in sorted(given - known))

    wanted = dict(re.findall(r"\bfind_package\((\w+)(?:\s+([\d.]+))?", text))
    wanted.update({name: "" for name in re.findall(r"\bfind_path\(\w+ (\S+\.hh)", text)})
    wanted.update({name.removesuffix("-8"): "" for name in re.findall(r"\bfind_library\(\w+ (?:NAMES )?([\w-]+)", text)})
    depended = dependencies(recipe)
    for found, version in wanted.items():
        package = PACKAGES.get(found, found)
        if package is None or package in FOR_TESTS:
            continue
        if package not in depended:
            yield f"CMake finds {found}, the recipe does not depend on {package}"
        elif version and depended[package] != version:
            yield f"CMake wants {found} {version}, the recipe {package} {depended[package] or 'of any version'}"
    brought = {PACKAGES.get(found, found) for found in wanted}
    yield from (f"the recipe depends on {name}, which CMake does not look for" for name in sorted(set(depended) - brought - OTHERS))
    minimum = re.search(r"cmake_minimum_required\(VERSION ([\d.]+)", text)[1]
    if depended["cmake"] != minimum:
        yield f"CMakeLists.txt wants CMake {minimum}, the recipe {depended['cmake']}"


def check_package(repository):
    """The recipe of the Python package depends on what python/pyproject.toml requires, and on what chat templates need."""
    text = (repository / "python" / "pyproject.toml").read_text()
    requirements = re.search(r"^requires = \[(.*?)\]", text, re.M)[1] + "," + re.search(r"^dependencies = \[(.*?)\]", text, re.M)[1]
    requirements += "," + re.search(r"^chat = \[(.*?)\]", text, re.M)[1]
    wanted = {f"py-{name}": least for name, least in re.findall(r'"([\w-]+)(?:>=([\d.]+))?"', requirements)}
    wanted["python"] = re.search(r'^requires-python = ">=([\d.]+)"', text, re.M)[1]
    found = dependencies(repository / "spack_repo/weft/packages/py_weft/package.py")
    if found != wanted:
        yield f"py-weft depends on {found}, pyproject.toml requires {wanted}"


repository = Path(sys.argv[1]).resolve()
problems = [*check_cmake(repository), *check_package(repository)]
print("\n".join(problems) or "no differences")
sys.exit(1 if problems else 0)
