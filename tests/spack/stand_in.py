# SPDX-License-Identifier: Apache-2.0
"""A small mock of Spack's package language: loads a recipe and records the arguments of its directives.

It selects no versions and solves no constraints; it shows only what a recipe declares.
"""
import ast
import builtins
import contextlib
import json
import re
import subprocess
import sys
import types
from pathlib import Path

# Variants that CudaPackage, ROCmPackage and CMakePackage add to a recipe.
MIXIN_VARIANTS = {"CudaPackage": {"cuda", "cuda_arch"}, "ROCmPackage": {"rocm", "amdgpu_target"},
                  "CMakePackage": {"build_type", "generator", "ipo", "build_system"}}

UPSTREAM = Path(__file__).parent / "upstream.json"
# The architectures of the real CudaPackage, as recorded.
CUDA_ARCHITECTURES = tuple(json.loads(UPSTREAM.read_text())["cuda_arch_values"]) if UPSTREAM.exists() else ("90",)


class Anything:
    """Returns itself for every operation: for the parts of a recipe that are not checked."""

    def __call__(self, *arguments, **options):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __iter__(self):
        return iter(())

    def __getitem__(self, key):
        return self

    def __add__(self, other):
        return self

    __radd__ = __sub__ = __or__ = __mod__ = __add__

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


class BuildSystem(Anything):
    """Other imports from a build system than its classes: a function (generator), or the module that contains the classes."""

    def __init__(self, classes):
        self.classes = classes

    def __getattr__(self, name):
        return self.classes(name) if name[:1].isupper() else super().__getattr__(name)


class SkipTest(Exception):
    pass


class Program:
    """Executable: runs a program and raises if it fails."""

    def __init__(self, path):
        self.path = path

    def __call__(self, *arguments, output=None, error=None):
        done = subprocess.run([self.path, *arguments], text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, f"{self.path} {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout


class Recipe:
    """The class of a recipe and its declarations: (directive, arguments, options) in order."""

    def __init__(self, path):
        self.path = Path(path)
        self.source = self.path.read_text()
        self.tree = ast.parse(self.source)
        self.declared, self._conditions = [], []
        self._load()

    def of(self, directive):
        return [(arguments, options) for name, arguments, options in self.declared if name == directive]

    def variants(self):
        """Names of its own and inherited variants; None for a computed name."""
        names = {arguments[0] for arguments, _ in self.of("variant")}
        for base in self.bases:
            names |= MIXIN_VARIANTS.get(base, set())
        return names

    def _load(self):
        module_class = self._base_classes
        package = types.ModuleType("spack.package")
        imported = {alias.asname or alias.name for node in ast.walk(self.tree) if isinstance(node, (ast.Import, ast.ImportFrom))
                    for alias in node.names}
        for name in ast.walk(self.tree):
            if isinstance(name, ast.Name) and not hasattr(builtins, name.id) and name.id not in imported:
                setattr(package, name.id, Anything())
        for directive in ("version", "variant", "depends_on", "conflicts", "requires", "provides", "license", "maintainers",
                          "patch", "resource", "build_system"):
            setattr(package, directive, self._recorder(directive))
        package.when = self._when
        package.default_args = lambda **_: contextlib.nullcontext()
        package.run_after = package.run_before = package.on_package_attributes = lambda *_, **__: lambda function: function
        package.join_path = lambda *parts: "/".join(map(str, parts))
        package.Executable, package.SkipTest = Program, SkipTest
        package.check_outputs = self._check_outputs
        package.working_dir = self._working_dir
        namespace = {"__name__": "package", "__file__": str(self.path)}
        modules = {"spack": types.ModuleType("spack"), "spack.package": package}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and re.match(r"spack(?!\.package$)", node.module):
                parts = node.module.split(".")
                for end in range(1, len(parts) + 1):
                    modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
                for alias in node.names:
                    setattr(modules[node.module], alias.name, module_class(alias.name))
        package.__all__ = [name for name in vars(package) if not name.startswith("__")]
        saved = {name: sys.modules.get(name) for name in modules}
        sys.modules.update(modules)
        try:
            exec(compile(self.tree, str(self.path), "exec"), namespace)
        finally:
            for name, module in saved.items():
                sys.modules.pop(name)
                if module is not None:
                    sys.modules[name] = module
        wanted = self.path.parent.name.replace("_", "")
        self.package = next(value for name, value in namespace.items() if name.lower() == wanted.lower() and isinstance(value, type))
        self.bases = [base.__name__ for base in self.package.__mro__]

    def _base_classes(self, name):
        if name.islower():
            return BuildSystem(self._base_classes)
        attributes = {"cuda_arch_values": CUDA_ARCHITECTURES, "amdgpu_targets": ("gfx90a", "gfx942")}
        return type(name, (), attributes)

    def _recorder(self, directive):
        def record(*arguments, **options):
            conditions = [*self._conditions, *([options["when"]] if isinstance(options.get("when"), str) else [])]
            self.declared.append((directive, arguments, {**options, "when": " ".join(conditions)}))
        return record

    def _when(self, condition):
        recipe = self

        class When:
            def __enter__(self):
                recipe._conditions.append(condition)

            def __exit__(self, *_):
                recipe._conditions.pop()

            def __call__(self, function):
                return function
        return When()

    @staticmethod
    def _check_outputs(expected, text):
        assert re.search(expected, text, re.M), f"no \"{expected}\" in\n{text}"

    @staticmethod
    @contextlib.contextmanager
    def _working_dir(path, create=False):
        Path(path).mkdir(exist_ok=create)
        with contextlib.chdir(path):
            yield


class Spec:
    """The variants of a simulated installation."""

    def __init__(self, **variants):
        self.values = variants
        self.variants = {name: types.SimpleNamespace(value=value) for name, value in variants.items()}

    def satisfies(self, text):
        assert re.fullmatch(r"[+~]\w+", text), text
        return bool(self.values[text[1:]]) == (text[0] == "+")


class Prefix(str):
    """An installation's folder; its attributes are folders below it."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Prefix(f"{self}/{name}")


def instance(recipe, prefix="/nowhere", **variants):
    """An object of the recipe's class with these variants, sufficient for cmake_args() and the installation tests."""
    package = recipe.package()
    package.spec, package.prefix = Spec(**variants), Prefix(prefix)

    def define(name, value):
        if isinstance(value, bool):
            return f"-D{name}:BOOL={'ON' if value else 'OFF'}"
        return f"-D{name}:STRING={';'.join(value) if isinstance(value, (list, tuple)) else value}"
    package.define = define
    package.define_from_variant = lambda name, variant: define(name, variants[variant])
    return package
