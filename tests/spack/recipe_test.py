# SPDX-License-Identifier: Apache-2.0
"""Compares the Spack recipe and environment with CMake and with the names of Spack's own recipes.

recipe_test.py REPOSITORY [CMAKE]

Spack is not used: stand_in.py loads the recipe and records its directives, upstream.json (record_upstream.py) contains the names
of upstream packages and variants at one commit. With CMAKE the recipe's arguments are also passed to a configure run. This does not
show that a concretizer finds a solution.
"""
import ast
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import stand_in

# Package found by CMake -> Spack package; None: part of every system.
PACKAGES = {"MPI": "mpi", "HDF5": "hdf5", "OpenSSL": "openssl", "fmt": "fmt", "spdlog": "spdlog", "nlohmann_json": "nlohmann-json",
            "CLI11": "cli11", "tomlplusplus": "tomlplusplus", "Kokkos": "kokkos", "CUDAToolkit": "cuda", "doctest": "doctest",
            "NCCL": "nccl", "openblas": "openblas", "zstd": "zstd", "lz4": "lz4", "pcre2": "pcre2", "kissfft.hh": "kissfft", "Threads": None}
# Needed, but not searched for by CMake: compilers, build tools, Python for tests.
OTHERS = {"c", "cxx", "cmake", "python", "py-numpy", "py-h5py"}
# Variants that are off in these tests.
OFF = {"tests": False, "sanitizers": False, "fuzzers": False, "warnings_as_errors": False}
SPEC = re.compile(r"(?P<name>[a-z][\w-]*)?(@(?P<versions>[\w.:,]+))?(?P<rest>.*)", re.S)


def parse(text):
    """(package, versions, [variant names]) of a spec, for the syntax used by this recipe."""
    match = SPEC.fullmatch(text.strip())
    name, rest = match["name"], re.sub(r"%[\w=-]+", "", match["rest"])     # compilers are not variants
    if name and re.match(r"=", rest):     # "cuda_arch=90": a variant, not a package
        name, rest = None, text
    names, rest = [], rest.strip()
    while rest:
        part = re.match(r"[+~]([a-z][\w-]*)|([a-z][\w-]*)=[\w.,:-]+|\s+", rest)
        if not part:
            raise AssertionError(f"cannot read \"{rest}\" of the spec \"{text}\"")
        names += [found for found in part.groups() if found]
        rest = rest[part.end():]
    return name, match["versions"], names


def lowest(versions):
    return re.match(r"[\d.]*", versions or "")[0]


def cmake_text(repository):
    files = [repository / "CMakeLists.txt", *sorted((repository / "cmake").glob("Weft*.cmake")), *sorted((repository / "kernels").rglob("CMakeLists.txt")),
             *sorted((repository / "src").rglob("CMakeLists.txt"))]
    return "\n".join(re.sub(r"#.*", "", path.read_text()) for path in files)


def check_names(recipe, upstream, own_packages):
    """`own_packages`: recipes without variants beside that of weft."""
    own = recipe.variants()
    for directive in ("depends_on", "conflicts", "requires"):
        for arguments, options in recipe.of(directive):
            _, _, names = parse(options["when"])
            yield from (f"when=\"{options['when']}\" names no variant of weft: {name}" for name in names if name not in own)
            package, _, names = parse(arguments[0])
            if package is None:
                yield from (f"{directive}(\"{arguments[0]}\") names no variant of weft: {name}" for name in names if name not in own)
            elif package in own_packages:
                if names:
                    yield f"{package} has no variant {names}: its recipe is that of this repository"
            elif package not in upstream["packages"] and package not in upstream["virtuals"]:
                yield f"{package} is not in upstream.json: add it to record_upstream.py and record again"
            elif package in upstream["packages"]:
                known = upstream["packages"][package]["variants"]
                yield from (f"{package} has no variant {name} at {upstream['commit'][:12]}" for name in names if name not in known)
    called = {node.args[1].value for node in ast.walk(recipe.tree) if isinstance(node, ast.Call)
              and getattr(node.func, "attr", "") == "define_from_variant"}
    yield from (f"define_from_variant names no variant of weft: {name}" for name in called - own)


def check_cmake(recipe, text):
    """Options and libraries of the recipe and of CMake are the same."""
    options = set(re.findall(r"\boption\((\w+)", text))
    settings = set(re.findall(r"\bset\((WEFT_\w+)\s[^)]*?\bCACHE\b", text))
    given = set()
    for variants in ({"cuda": True, "cuda_arch": ("90",)}, {"cuda": False, "cuda_arch": ()}):
        arguments = stand_in.instance(recipe, **OFF, **variants).cmake_args()
        given |= {re.match(r"-D(\w+)", argument)[1] for argument in arguments}
    yield from (f"cmake_args gives {name}, which CMake does not know" for name in given - options - settings - {"CMAKE_CUDA_ARCHITECTURES"})
    yield from (f"the recipe does not set the option {name}" for name in options - given)
    own = {name for name in recipe.variants() - {"cuda_arch"} if not any(name in names for base, names in stand_in.MIXIN_VARIANTS.items()
                                                                        if base != "CudaPackage")}
    expected = {name.removeprefix("WEFT_").removeprefix("ENABLE_").lower() for name in options}
    if own != expected:
        yield f"variants {sorted(own)} are not the options of CMakeLists.txt, {sorted(expected)}"

    wanted = dict(re.findall(r"\bfind_package\((\w+)(?:\s+([\d.]+))?", text))
    wanted.update({name: "" for name in re.findall(r"\bfind_path\(\w+ (\S+\.hh)", text)})
    wanted.update({name: "" for name in re.findall(r"\bfind_library\(\w+ (?:NAMES )?(\w+)", text)})
    depended = {}
    for arguments, _ in recipe.of("depends_on"):
        package, versions, _ = parse(arguments[0])
        depended[package] = depended.get(package) or lowest(versions)
    for found, version in wanted.items():
        if found not in PACKAGES:
            yield f"CMake finds {found}; which Spack package is that? (recipe_test.py, PACKAGES)"
        elif PACKAGES[found] and PACKAGES[found] not in depended:
            yield f"CMake finds {found}, the recipe does not depend on {PACKAGES[found]}" + (
                " (with an architecture: for each arch depends_on(f\"nccl +cuda cuda_arch={arch}\", when=f\"+cuda cuda_arch={arch}\"))"
                if found == "NCCL" else "")
        elif version and PACKAGES[found] and depended[PACKAGES[found]] != version:
            yield f"CMake wants {found} {version}, the recipe {PACKAGES[found]} {depended[PACKAGES[found]] or 'of any version'}"
    brought = {PACKAGES[found] for found in wanted if found in PACKAGES}
    yield from (f"the recipe depends on {name}, which CMake does not look for" for name in set(depended) - brought - OTHERS)
    minimum = re.search(r"cmake_minimum_required\(VERSION ([\d.]+)", text)[1]
    if depended["cmake"] != minimum:
        yield f"CMakeLists.txt wants CMake {minimum}, the recipe {depended['cmake']}"


def check_gpu(recipe, upstream):
    """One architecture, passed to everything that is compiled for the GPU."""
    declared = {(arguments[0], options["when"]) for arguments, options in recipe.of("depends_on")}
    for arch in upstream["cuda_arch_values"]:
        for package in ("kokkos", "nccl"):
            if package == "nccl" and not any(spec.startswith("nccl") for spec, _ in declared):
                continue
            if not any(parse(spec)[0] == package and f"cuda_arch={arch}" in spec.split() and f"cuda_arch={arch}" in when.split()
                       for spec, when in declared):
                yield f"{package} does not get cuda_arch={arch}"
    if not any("+cmake_lang" in spec and "~wrapper" in spec and when == "+cuda" for spec, when in declared):
        yield "with +cuda Kokkos must be +cmake_lang ~wrapper"
    if not any(arguments[0] == "cuda_arch=none" for arguments, _ in recipe.of("conflicts")):
        yield "+cuda without an architecture is not refused"
    args = stand_in.instance(recipe, **OFF, cuda=True, cuda_arch=("90",)).cmake_args()
    if "-DCMAKE_CUDA_ARCHITECTURES:STRING=90" not in args:
        yield f"cuda_arch=90 is not passed on: {args}"


def check_style(recipe):
    """Package API v2: build systems from spack_repo.builtin, the language from spack.package, compilers as dependencies."""
    modules = {node.module for node in ast.walk(recipe.tree) if isinstance(node, ast.ImportFrom)}
    expected = {"spack_repo.builtin.build_systems.cmake", "spack_repo.builtin.build_systems.cuda", "spack.package"}
    if modules != expected:
        yield f"imports are from {sorted(modules)}, not from {sorted(expected)}"
    if not {"c", "cxx"} <= {arguments[0] for arguments, _ in recipe.of("depends_on")}:
        yield "compilers are dependencies since Spack 1.0: depends_on(\"c\"), depends_on(\"cxx\")"
    for arguments, options in recipe.of("version"):
        if "sha256" in options and "url" not in options and not hasattr(recipe.package, "url"):
            yield f"version {arguments[0]} has a digest and nothing to compare it with (no url)"
    if not hasattr(recipe.package, "sanity_check_is_file") or not any(name.startswith("test_") for name in vars(recipe.package)):
        yield "no tests of the installation"


def check_environment(repository, recipe, upstream):
    """spack.yaml and repo.yaml: only keys of Spack's schema, and specs of existing packages."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def unique(loader, node):
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"duplicate key: {keys}"
        return {loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value}
    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, unique)

    repo = yaml.load((repository / "spack_repo" / "weft" / "repo.yaml").read_text(), Loader)
    if repo != {"repo": {"namespace": "weft", "api": "v2.2"}}:
        yield f"repo.yaml: {repo}"
    document = yaml.load((repository / "spack.yaml").read_text(), Loader)
    if set(document) != {"spack"}:
        yield f"spack.yaml: top keys {set(document)}"
    spack = document["spack"]
    yield from (f"spack.yaml: unknown key {key}" for key in set(spack) - {"specs", "view", "concretizer", "packages", "repos", "develop",
                                                                        "include", "definitions", "config", "modules"})
    for name, path in spack["repos"].items():
        if not (repository / path.replace("$env/", "") / "repo.yaml").is_file():
            yield f"spack.yaml: repository {name} is not at {path}"
    if spack["concretizer"].get("unify") not in (True, False, "when_possible"):
        yield "spack.yaml: concretizer"
    for spec in spack["specs"]:
        name, _, variants = parse(spec)
        if name != "weft" or not set(variants) <= recipe.variants():
            yield f"spack.yaml: spec {spec}"
    for name, settings in spack["packages"].items():
        if name not in upstream["packages"] and name not in upstream["virtuals"]:
            yield f"spack.yaml: package {name}"
        yield from (f"spack.yaml: packages.{name}.{key}" for key in set(settings) - {"externals", "buildable", "require", "prefer", "conflict"})
        package, _, variants = parse(settings["require"])
        package = package or name
        yield from (f"spack.yaml: {package} has no variant {variant}" for variant in variants
                    if variant not in upstream["packages"][package]["variants"])
        if package == "openmpi" and "schedulers" not in variants:
            yield "spack.yaml: Open MPI 5 needs explicit schedulers"


def check_configure(repository, recipe, cmake):
    """A configure run accepts all of the recipe's arguments."""
    package = stand_in.instance(recipe, cuda=False, cuda_arch=(), **OFF)
    with tempfile.TemporaryDirectory(prefix="weft_recipe_") as folder:
        done = subprocess.run([cmake, "-S", repository, "-B", folder, *package.cmake_args()], text=True, check=False, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
    if done.returncode != 0 or "not used by the project" in done.stdout:
        yield f"CMake does not accept the recipe's arguments:\n{done.stdout}"


def check_package(repository):
    """The recipe of the Python package depends on what python/pyproject.toml requires."""
    text = (repository / "python" / "pyproject.toml").read_text()
    requirements = re.search(r"^requires = \[(.*?)\]", text, re.M)[1] + "," + re.search(r"^dependencies = \[(.*?)\]", text, re.M)[1]
    wanted = {(f"py-{name}", least) for name, least in re.findall(r'"([\w-]+)(?:>=([\d.]+))?"', requirements)}
    wanted.add(("python", re.search(r'^requires-python = ">=([\d.]+)"', text, re.M)[1]))
    recipe = stand_in.Recipe(repository / "spack_repo" / "weft" / "packages" / "py_weft" / "package.py")
    found = {(name, lowest(versions)) for name, versions, _ in (parse(arguments[0]) for arguments, _ in recipe.of("depends_on"))}
    if found - {("weft", "")} != wanted:
        yield f"py-weft depends on {sorted(found)}, pyproject.toml requires {sorted(wanted)}"


def self_check(recipe, upstream, own_packages, text):
    """The checks detect the errors that a concretizer or a user would encounter."""
    def broken(change, to, check, *arguments):
        assert change in recipe.source, change
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "weft" / "package.py"
            path.parent.mkdir()
            path.write_text(recipe.source.replace(change, to))
            assert list(check(stand_in.Recipe(path), *arguments)), f"\"{to}\" was not detected"
    broken('when="~cuda"', 'when="~gpu"', check_names, upstream, own_packages)
    broken("+cmake_lang ~wrapper", "+cmake_language ~wrapper", check_names, upstream, own_packages)
    broken("nlohmann-json@3.11:", "json@3.11:", check_names, upstream, own_packages)
    broken('"WEFT_ENABLE_CUDA", "cuda"', '"WEFT_CUDA", "cuda"', check_cmake, text)
    broken("kokkos@4.5:", "kokkos@4.6:", check_cmake, text)
    broken('depends_on("openssl")', "pass", check_cmake, text)
    broken('depends_on("zstd")', "pass", check_cmake, text)
    broken('depends_on("mpi")', 'depends_on("mpi")\n    depends_on("ninja")', check_cmake, text)
    broken('variant("sanitizers"', 'variant("asan"', check_cmake, text.replace("SANITIZERS", "ASAN_AND_UBSAN"))
    broken("CudaPackage.cuda_arch_values", "('80',)", check_gpu, upstream)
    broken("+cmake_lang ~wrapper", "+wrapper", check_gpu, upstream)
    broken("from spack_repo.builtin.build_systems.cuda import CudaPackage", "from spack.build_systems.cuda import CudaPackage", check_style)


def main():
    repository = Path(sys.argv[1]).resolve()
    upstream = json.loads(stand_in.UPSTREAM.read_text())
    recipe = stand_in.Recipe(repository / "spack_repo" / "weft" / "packages" / "weft" / "package.py")
    own_packages = {path.parent.name for path in recipe.path.parent.parent.glob("*/package.py")} - {"weft"}
    text = cmake_text(repository)
    found = [*check_names(recipe, upstream, own_packages), *check_cmake(recipe, text), *check_gpu(recipe, upstream), *check_style(recipe),
             *check_environment(repository, recipe, upstream), *check_package(repository)]
    if not found:
        self_check(recipe, upstream, own_packages, text)
    if len(sys.argv) > 2:
        found += check_configure(repository, recipe, sys.argv[2])
    print("\n".join(found) or f"{len(recipe.declared)} directives, no problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
