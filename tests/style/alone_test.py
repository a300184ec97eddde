# SPDX-License-Identifier: Apache-2.0
"""Each source of src/ compiles by itself, as a build without CMAKE_UNITY_BUILD compiles it: in a group an include that is missing goes
unnoticed if an earlier source has it.

To compile all of them takes minutes. So the preprocessor lists the headers that a source includes, directly and through others, and only a
source that uses a name which none of these declares is compiled, up to the end of syntax. Names are those at namespace scope of the headers of
the repository, and those of libraries in the tables below. Not seen: an overload of a function that another header of the source declares; a
function of C or POSIX.

alone_test.py REPOSITORY BUILD
"""
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headers_test import SKIPPED, plain

# Header -> names of namespace std (fmt for fmt/...). A header of the list that another brings along counts.
LIBRARY = {
    "algorithm": "adjacent_find all_of any_of clamp copy_if count count_if equal_range fill_n find find_if is_sorted lower_bound max_element "
                 "merge min_element minmax_element mismatch none_of nth_element partial_sort partition_point pop_heap push_heap replace "
                 "reverse sort stable_partition stable_sort transform unique upper_bound",
    "array": "array to_array", "atomic": "atomic atomic_flag memory_order_relaxed memory_order_release", "bit": "bit_ceil bit_floor endian has_single_bit popcount",
    "bitset": "bitset", "charconv": "from_chars from_chars_result to_chars", "chrono": "chrono", "complex": "complex conj norm",
    "condition_variable": "condition_variable", "deque": "deque", "filesystem": "filesystem", "fstream": "ifstream ofstream fstream",
    "functional": "function greater hash less plus", "future": "async future launch promise", "iterator": "back_inserter move_iterator istreambuf_iterator",
    "map": "map multimap", "memory": "make_shared make_unique shared_ptr unique_ptr weak_ptr",
    "mutex": "call_once lock_guard mutex once_flag recursive_mutex scoped_lock unique_lock", "numbers": "numbers",
    "numeric": "accumulate gcd inner_product iota lcm partial_sum", "optional": "nullopt optional", "queue": "priority_queue queue", "set": "multiset set",
    "span": "as_bytes as_writable_bytes span", "sstream": "istringstream ostringstream stringstream", "stdexcept": "logic_error out_of_range runtime_error",
    "string": "getline stod stoi stol stoll stoul string to_string", "system_error": "errc error_code generic_category system_error", "thread": "jthread this_thread thread",
    "tuple": "apply tie tuple", "unordered_map": "unordered_map", "unordered_set": "unordered_set", "utility": "exchange pair swap",
    "variant": "get_if holds_alternative monostate variant visit", "vector": "vector",
    "fmt/format.h": "format format_string format_to format_to_n runtime to_string", "fmt/ranges.h": "join",
}
HEADERS_OF = {}
for header_, names_ in LIBRARY.items():
    for name_ in names_.split():
        HEADERS_OF.setdefault(("fmt" if header_.startswith("fmt/") else "std", name_), []).append(header_)
HEADERS_OF["fmt", "join"].append("fmt/format.h")     # before fmt 11
# Beginnings of the names of other libraries.
PREFIXES = {"H5": "hdf5.h", "MPI_": "mpi.h", "pcre2_": "pcre2.h", "PCRE2_": "pcre2.h", "ZSTD_": "zstd.h", "LZ4F_": "lz4frame.h", "EVP_": "evp.h",
            "utf8proc_": "utf8proc.h", "cblas_": "cblas.h", "omp_": "omp.h"}
PREFIX = re.compile("|".join(PREFIXES))
SPACES = {"toml": "toml.h", "CLI": "CLI.hpp", "nlohmann": "json_fwd.hpp", "Kokkos": "Kokkos_Core.hpp"}

TOKEN = re.compile(r"[A-Za-z_]\w*|::|->|&&|\d[\w.']*|[^\s\w]")
NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])*\'', re.S)
KEYWORDS = set("alignas alignof auto bool catch char class concept const consteval constexpr constinit decltype default delete double else enum "
               "explicit extern false final float for friend if inline int long namespace noexcept nullptr operator override private protected public "
               "requires return short signed sizeof static static_assert struct switch template this thread_local throw true try typedef typename union "
               "unsigned using virtual void volatile while __attribute__ __host__ __device__ __global__ __restrict__".split())

TYPES = set("auto bool char double float int long short unsigned".split())


def tokens_of(text):
    """The tokens of a source, without comments, texts and directives, and the macros that it defines."""
    text = NOISE.sub(lambda found: " " if found[0].startswith("/") else ' "" ', text).replace("\\\n", " ")
    macros = re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", text, re.M)
    return TOKEN.findall(re.sub(r"^[ \t]*#[^\n]*", "", text, flags=re.M)), macros


def is_name(token):
    return (token[0].isalpha() or token[0] == "_") and token not in KEYWORDS


def names_in(statement, end):
    """[(name, is a function)] that a statement at namespace scope declares; `end` is the token after it."""
    while statement and statement[0] in ("template", "[", "extern", "export"):
        if statement[0] == "template":
            depth, last = 0, 0
            for last, token in enumerate(statement[1:], 1):
                depth += (token == "<") - (token == ">")
                if depth == 0:
                    break
            statement = statement[last + 1:]
        elif statement[0] == "[":
            statement = statement[statement.index("]", statement.index("]") + 1) + 1:] if statement.count("]") > 1 else []
        else:
            statement = statement[1:]
    if not statement or statement[0] in ("static_assert", "namespace", "friend"):
        return []
    if statement[0] == "using":
        return [(statement[1], False)] if end == "=" else [(token, False) for token in statement[-1:] if is_name(token) and "namespace" not in statement]
    if statement[0] in ("struct", "class", "union", "enum") and end == "{" and "(" not in statement:
        return [(token, False) for token in statement if is_name(token)][:1]
    if "(" in statement:
        first = statement.index("(")
        before, inside = statement[first - 1], statement[first + 1:first + 2]
        if first > 0 and is_name(before):
            # A macro that declares: its first argument.
            return [(token, True) for token in inside if is_name(token)] if before.isupper() else [(before, True)]
        return []
    if statement[0] in ("struct", "class", "union", "enum") and len(statement) == 2 and end == ";":
        return []      # a declaration without definition
    while statement[-1:] == ["]"]:      # an array
        statement = statement[:len(statement) - 1 - statement[::-1].index("[")]
    return [(token, False) for token in statement[-1:] if is_name(token)]


def declared(text):
    """{(innermost namespace, name): is a function} at namespace scope."""
    tokens, macros = tokens_of(text)
    names = {("", macro): False for macro in macros}
    scopes, statement, parentheses, position = [], [], 0, 0
    while position < len(tokens):
        token = tokens[position]
        outside = all(kind is not None for kind in scopes)
        if token == "{" and parentheses == 0:
            if outside and "namespace" in statement:
                scopes.append(statement[-1] if is_name(statement[-1]) else scopes[-1] if scopes else "")
            elif outside and statement[:1] == ["extern"] and "(" not in statement:
                scopes.append(scopes[-1] if scopes else "")
            else:
                if outside:
                    for name, function in names_in(statement, token):
                        names[scopes[-1] if scopes else "", name] = function
                    if statement[:1] == ["enum"] and statement[1:2] != ["class"]:
                        for name in tokens[position:tokens.index("}", position)]:
                            if is_name(name):
                                names[scopes[-1] if scopes else "", name] = False
                scopes.append(None)
            statement = []
        elif token == "}" and parentheses == 0:
            if scopes:
                scopes.pop()
            statement = []
        elif outside:
            parentheses += (token == "(") - (token == ")")
            if token in (";", "=") and parentheses == 0:
                for name, function in names_in(statement, token):
                    names[scopes[-1] if scopes else "", name] = function
                # What follows "=" declares nothing, except after a comma.
                statement = [] if token == ";" else ["static_assert"]
            elif token == "," and parentheses == 0 and is_name(tokens[position + 1]) and tokens[position + 2] in ("=", ";", "{"):
                names[scopes[-1] if scopes else "", tokens[position + 1]] = False
            else:
                statement.append(token)
        else:
            parentheses += (token == "(") - (token == ")")
            if token == ";" and parentheses < 0:
                parentheses = 0
        position += 1
    return names


class Headers:
    """Which header of the repository declares a name."""

    def __init__(self, repository):
        self.of_file, self.tokens, self.called, self.announced = {}, {}, {}, {}
        for top in ("src", "kernels"):
            for path in (repository / top).rglob("*"):
                if path.suffix in (".hpp", ".cuh"):
                    text = path.read_text()
                    self.of_file[str(path)] = declared(text)
                    tokens = tokens_of(text)[0]
                    self.tokens[str(path)] = set(tokens)
                    self.called[str(path)] = {name for name, following in zip(tokens, tokens[1:]) if following in ("(", "<")}
                    self.announced[str(path)] = set(re.findall(r"\b(?:struct|class) (\w+);", text))
        self.where = {}
        for path, names in self.of_file.items():
            for (space, name), function in names.items():
                self.where.setdefault(name, []).append((path, space, function))

    def undeclared(self, text, closure):
        """Names that the source uses and a header declares, but none of `closure`."""
        tokens, _ = tokens_of(text)
        own = {name for _, name in declared(text)}
        # Variables and parameters: after their type, before a value or the end.
        own.update(name for previous, name, following in zip(tokens, tokens[1:], tokens[2:]) if following in ("=", ";", ",", ")", "{", "(", ":", "[", "]")
                   and (previous in TYPES or is_name(previous) or previous in ("&", "*", ">", "&&")))
        # Names of these namespaces need no qualification.
        opened = {""} | {name for list_ in re.findall(r"\bnamespace\s+([\w:]+)\s*[{;]", text) for name in list_.split("::")}
        files, found = {path for path in closure if path in self.of_file}, {}
        called = set().union(*(self.called[path] for path in files))
        # Names that the headers use, for example as members: their own compilation proves those. A type that is only announced is none.
        members = set().union(*(self.tokens[path] for path in files)) - set().union(*(self.announced[path] for path in files))
        endings = {"/".join(path.rsplit("/", 2)[-2:]) if "/fmt/" in path else path.rsplit("/", 1)[-1] for path in closure}
        for before, previous, token, following in zip(["", "", *tokens], ["", *tokens], tokens, [*tokens[1:], ""]):
            if not is_name(token) or previous in (".", "->") or token in found:
                continue
            space = before if previous == "::" else None
            library = SPACES.get(token) if following == "::" else (prefix := PREFIX.match(token)) and PREFIXES[prefix[0]]
            if library and library not in endings and token not in members:
                found[token] = f"{token} (<{library}>)"
                continue
            if space in ("std", "fmt"):
                providers = HEADERS_OF.get((space, token))
                if providers and not endings.intersection(providers):
                    found[token] = f"{space}::{token} (<{providers[0]}>)"
                continue
            places = self.where.get(token, [])
            if not places or (space is None and token in own):
                continue
            spaces = {place[1] for place in places}
            member = token in (called if following == "(" else members)
            if space in spaces:
                places = [place for place in places if place[1] == space]
            elif space is None:
                places = [place for place in places if place[1] in opened]
                if not places or member:
                    continue
            elif member:
                continue
            if any(path in files for path, _, _ in places):
                continue
            if all(function for _, _, function in places) and following not in ("(", "<") and previous != "::":
                continue
            found[token] = f"{token} ({os.path.basename(places[0][0])})"
        return list(found.values())


def sources_with_flags(repository, build):
    """{source: (command, directory)}; of a group, each of its sources."""
    of_source = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file, command = entry["file"], plain(entry)
        members = re.findall(r'^#include "([^"]+\.cpp)"', Path(file).read_text(), re.M) if "/Unity/" in file else [file]
        for member in members:
            path = os.path.relpath(member, repository)
            if path.startswith(("src/", "kernels/")) and path.endswith(".cpp") and "nvcc" not in command[0]:
                of_source[path] = (command, entry["directory"])
    return of_source


def run(command, directory, text=None):
    return subprocess.run(command, cwd=directory, input=text, text=True, check=False, capture_output=True)


def check(headers, flags, directory, path, text, given=None):
    """(was compiled, the problem or nothing). `given`: the text of a source that is no file."""
    file = ["-x", "c++", "-"] if given else [path]
    listed = run([*flags, "-M", *file], directory, given)
    if listed.returncode:
        return True, f"{path}: {listed.stderr[:500]}"
    closure = {os.path.normpath(name) for name in listed.stdout.replace("\\\n", " ").split()[1:]}
    missing = headers.undeclared(text, closure)
    if not missing:
        return False, ""
    done = run([*flags, "-w", "-fsyntax-only", *file], directory, given)
    errors = [line for line in done.stderr.splitlines() if "error" in line][:3]
    return True, done.returncode and f"{path}: does not compile by itself; not included: {', '.join(missing[:6])}\n  " + "\n  ".join(errors)


def main():
    repository, build = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    if not (build / "compile_commands.json").is_file():
        print(f"skipped: {build}/compile_commands.json is missing (its generator writes none)")
        return SKIPPED
    sources = sources_with_flags(repository, build)
    assert len(sources) > 100, len(sources)
    headers = Headers(repository)
    flags, directory = sources[min(path for path in sources if path.startswith("src/"))]
    for text in ("std::map<int, int> table;\n", "#include <vector>\nstd::vector<weft::KnownTo> known;\n"):
        compiled, problem = check(headers, flags, directory, "example", text, given=text)
        assert compiled and problem, f"nothing is found in: {text}"

    def one(path):
        return check(headers, *sources[path], str(repository / path), (repository / path).read_text())

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(one, sorted(sources)))
    problems = [problem for _, problem in results if problem]
    print("\n".join(problems) or f"{len(sources)} sources; {sum(compiled for compiled, _ in results)} of them were compiled to be sure")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
