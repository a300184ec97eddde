# SPDX-License-Identifier: Apache-2.0
"""Compares the Spack recipes and environment with CMake and pyproject.toml, and with the names of Spack's own recipes.

recipe_test.py REPOSITORY      fails with a list of differences
recipe_test.py --record CLONE  writes upstream.json from a clone of https://github.com/spack/spack-packages

The recipes are read, not executed: Spack is not used, and nothing here shows that a concretizer finds a solution. upstream.json has the
variants of the packages on which the recipe depends, at one commit; record it again when the recipe names a new package.
"""
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

UPSTREAM = Path(__file__).parent / "upstream.json"
# Package found by CMake -> Spack package; None: part of every system.
PACKAGES = {"MPI": "mpi", "HDF5": "hdf5", "OpenSSL": "openssl", "fmt": "fmt", "spdlog": "spdlog", "nlohmann_json": "nlohmann-json",
            "CLI11": "cli11", "tomlplusplus": "tomlplusplus", "Kokkos": "kokkos", "CUDAToolkit": "cuda", "doctest": "doctest",
            "NCCL": "nccl", "openblas": "openblas", "zstd": "zstd", "lz4": "lz4", "pcre2": "pcre2", "utf8proc": "utf8proc", "kissfft.hh": "kissfft", "Threads": None}
# Needed, but not searched for by CMake: compilers, build tools, Python for tests.
OTHERS = {"c", "cxx", "cmake", "python", "py-numpy", "py-h5py"}
VIRTUALS = {"c", "cxx", "mpi"}
# Variants that the classes of which a recipe is one add to it.
INHERITED = {"CudaPackage": {"cuda", "cuda_arch"}, "ROCmPackage": {"rocm", "amdgpu_target"},
             "CMakePackage": {"build_type", "generator", "ipo", "build_system"}}
SPEC = re.compile(r"(?P<name>[a-z][\w-]*)?(@(?P<versions>[\w.:,]+))?(?P<rest>.*)", re.S)


def text_of(node):
    """A string of a recipe; the architecture of an f-string is 90."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "90" for part in node.values)
    return node.value if isinstance(node, ast.Constant) else ""


class Recipe:
    """The calls of a recipe: directives and what cmake_args defines."""

    def __init__(self, path):
        self.source = path.read_text()
        tree = ast.parse(self.source)
        self.calls = [(getattr(call.func, "id", getattr(call.func, "attr", "")), [text_of(argument) for argument in call.args],
                       {keyword.arg: text_of(keyword.value) for keyword in call.keywords})
                      for call in ast.walk(tree) if isinstance(call, ast.Call)]
        self.bases = {base.id for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases if isinstance(base, ast.Name)}

    def of(self, name):
        return [(arguments, options) for called, arguments, options in self.calls if called == name]

    def variants(self):
        return {arguments[0] for arguments, _ in self.of("variant")}.union(*(INHERITED.get(base, set()) for base in self.bases))


def parse(text):
    """(package, versions, [variant names]) of a spec, for the syntax used by this recipe."""
    match = SPEC.fullmatch(text.strip())
    name, rest = match["name"], re.sub(r"%[\w=-]+", "", match["rest"])     # compilers are not variants
    if name and rest.startswith("="):     # "cuda_arch=90": a variant, not a package
        name, rest = None, text
    names, rest = [], rest.strip()
    while rest:
        part = re.match(r"[+~]([a-z][\w-]*)|([a-z][\w-]*)=[\w.,:-]+|\s+", rest)
        assert part, f"cannot read \"{rest}\" of the spec \"{text}\""
        names += [found for found in part.groups() if found]
        rest = rest[part.end():]
    return name, match["versions"], names


def lowest(versions):
    return re.match(r"[\d.]*", versions or "")[0]


def check_names(recipe, upstream, own_packages):
    """`own_packages`: recipes without variants beside that of weft."""
    own = recipe.variants()
    for directive in ("depends_on", "conflicts", "requires"):
        for arguments, options in recipe.of(directive):
            when = options.get("when", "")
            package, _, names = parse(arguments[0])
            of_weft = parse(when)[2] + (names if package is None else [])
            yield from (f"{directive}(\"{arguments[0]}\", when=\"{when}\") names no variant of weft: {name}" for name in of_weft if name not in own)
            if package in own_packages and names:
                yield f"{package} has no variant {names}: its recipe is that of this repository"
            if package is None or package in VIRTUALS | own_packages:
                continue
            if package not in upstream["packages"]:
                yield f"{package} is not in upstream.json: record it again (recipe_test.py --record)"
                continue
            known = upstream["packages"][package]
            yield from (f"{package} has no variant {name} at {upstream['commit'][:12]}" for name in names if name not in known)


def check_cmake(recipe, repository):
    """Options and libraries of the recipe and of CMake are the same."""
    files = [repository / "CMakeLists.txt", *(repository / "cmake").glob("Weft*.cmake"), *(repository / "kernels").rglob("CMakeLists.txt"),
             *(repository / "src").rglob("CMakeLists.txt")]
    text = "\n".join(re.sub(r"#.*", "", path.read_text()) for path in files)
    options = set(re.findall(r"\boption\((\w+)", text))
    settings = set(re.findall(r"\bset\((WEFT_\w+)\s[^)]*?\bCACHE\b", text)) | {"CMAKE_CUDA_ARCHITECTURES"}
    from_variants = dict(arguments for arguments, _ in recipe.of("define_from_variant"))
    given = set(from_variants) | {arguments[0] for arguments, _ in recipe.of("define")}
    yield from (f"cmake_args gives {name}, which CMake does not know" for name in given - options - settings)
    yield from (f"the recipe does not set the option {name}" for name in options - given)
    yield from (f"define_from_variant(\"{option}\", \"{variant}\"): the variant of this option is named after it"
                for option, variant in from_variants.items() if variant != option.removeprefix("WEFT_").removeprefix("ENABLE_").lower())
    own = {arguments[0] for arguments, _ in recipe.of("variant")} | {"cuda"}
    if own != set(from_variants.values()):
        yield f"variants {sorted(own)} are not those that cmake_args passes on, {sorted(from_variants.values())}"

    wanted = dict(re.findall(r"\bfind_package\((\w+)(?:\s+([\d.]+))?", text))
    wanted.update({name: "" for name in re.findall(r"\bfind_path\(\w+ (\S+\.hh)", text)})
    wanted.update({name: "" for name in re.findall(r"\bfind_library\(\w+ (?:NAMES )?(\w+)", text)})
    depended = {}
    for arguments, _ in recipe.of("depends_on"):
        package, versions, _ = parse(arguments[0])
        depended[package] = depended.get(package) or lowest(versions)
    for found, version in wanted.items():
        package = PACKAGES.get(found, "")
        if package == "":
            yield f"CMake finds {found}; which Spack package is that? (recipe_test.py, PACKAGES)"
        elif package and package not in depended:
            yield f"CMake finds {found}, the recipe does not depend on {package}"
        elif package and version and depended[package] != version:
            yield f"CMake wants {found} {version}, the recipe {package} {depended[package] or 'of any version'}"
    brought = {PACKAGES.get(found) for found in wanted}
    yield from (f"the recipe depends on {name}, which CMake does not look for" for name in set(depended) - brought - OTHERS)
    minimum = re.search(r"cmake_minimum_required\(VERSION ([\d.]+)", text)[1]
    if depended["cmake"] != minimum:
        yield f"CMakeLists.txt wants CMake {minimum}, the recipe {depended['cmake']}"


def check_gpu(recipe):
    """One architecture, passed to everything that is compiled for the GPU."""
    declared = [(parse(arguments[0]), arguments[0].split(), options.get("when", "").split()) for arguments, options in recipe.of("depends_on")]
    for package in ("kokkos", "nccl"):
        if not any(name == package and "cuda_arch=90" in spec and "cuda_arch=90" in when for (name, *_), spec, when in declared):
            yield f"{package} does not get cuda_arch"
    if "for arch in CudaPackage.cuda_arch_values:" not in recipe.source:
        yield "dependencies do not follow the architectures of Spack's CudaPackage"
    if not any("+cmake_lang" in spec and "~wrapper" in spec and when == ["+cuda"] for _, spec, when in declared):
        yield "with +cuda Kokkos must be +cmake_lang ~wrapper"
    if not any(arguments[0] == "cuda_arch=none" for arguments, _ in recipe.of("conflicts")):
        yield "+cuda without an architecture is not an error"


def check_environment(repository, recipe, upstream):
    """spack.yaml: specs of existing packages and variants."""
    import yaml
    spack = yaml.safe_load((repository / "spack.yaml").read_text())["spack"]
    for name, path in spack["repos"].items():
        if not (repository / path.replace("$env/", "") / "repo.yaml").is_file():
            yield f"spack.yaml: repository {name} is not at {path}"
    for spec in spack["specs"]:
        name, _, variants = parse(spec)
        if name != "weft" or not set(variants) <= recipe.variants():
            yield f"spack.yaml: spec {spec}"
    for name, settings in spack["packages"].items():
        package, _, variants = parse(settings["require"])
        package = package or name
        yield from (f"spack.yaml: {package} has no variant {variant}" for variant in variants if variant not in upstream["packages"].get(package, []))
        if package == "openmpi" and "schedulers" not in variants:
            yield "spack.yaml: Open MPI 5 needs explicit schedulers"


def check_package(repository, recipe):
    """The recipe of the Python package depends on what python/pyproject.toml requires."""
    text = (repository / "python" / "pyproject.toml").read_text()
    requirements = re.search(r"^requires = \[(.*?)\]", text, re.M)[1] + "," + re.search(r"^dependencies = \[(.*?)\]", text, re.M)[1]
    wanted = {(f"py-{name}", least) for name, least in re.findall(r'"([\w-]+)(?:>=([\d.]+))?"', requirements)}
    wanted.add(("python", re.search(r'^requires-python = ">=([\d.]+)"', text, re.M)[1]))
    found = {(name, lowest(versions)) for name, versions, _ in (parse(arguments[0]) for arguments, _ in recipe.of("depends_on"))}
    if found - {("weft", "")} != wanted:
        yield f"py-weft depends on {sorted(found)}, pyproject.toml requires {sorted(wanted)}"


def record(clone):
    packages = clone / "repos" / "spack_repo" / "builtin" / "packages"
    commit = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    names = json.loads(UPSTREAM.read_text())["packages"]
    UPSTREAM.write_text(json.dumps({
        "repository": "https://github.com/spack/spack-packages", "commit": commit,
        "packages": {name: sorted(Recipe(packages / name.replace("-", "_") / "package.py").variants() - {""}) for name in names}}, indent=1) + "\n")


def main():
    if sys.argv[1] == "--record":
        return record(Path(sys.argv[2]))
    repository = Path(sys.argv[1]).resolve()
    upstream = json.loads(UPSTREAM.read_text())
    folder = repository / "spack_repo" / "weft" / "packages"
    recipe = Recipe(folder / "weft" / "package.py")
    own_packages = {path.parent.name for path in folder.glob("*/package.py")} - {"weft"}
    found = [*check_names(recipe, upstream, own_packages), *check_cmake(recipe, repository), *check_gpu(recipe),
             *check_environment(repository, recipe, upstream), *check_package(repository, Recipe(folder / "py_weft" / "package.py"))]
    print("\n".join(found) or f"{len(recipe.calls)} calls, no problems")
    return 1 if found else 0


sys.exit(main())
