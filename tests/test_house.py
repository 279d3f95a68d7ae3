"""The rules of the house that neither ruff, mypy nor import-linter check."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import tapestream
from tapestream import errors

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tapestream"
MOST_LINES_OF_A_FILE = 350
MOST_LINES_OF_A_FUNCTION = 60
TEST_FOLDERS_WITHOUT_A_PACKAGE = {
    "memory",
    "oracles",
    "golden",
    "field",
    "gpu",
    "simulated_gpu",
    "transformers",
    "benchmarks",
    "examples",
}


def modules() -> Iterator[tuple[Path, str, ast.Module]]:
    """Every source file that is not empty: path below ``src``, text, tree."""
    for path in sorted(SOURCE.rglob("*.py")):
        if text := path.read_text():
            yield path.relative_to(SOURCE.parent), text, ast.parse(text)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_files_and_functions_are_short() -> None:
    long = [f"{path}: {len(text.splitlines())} lines" for path, text, _ in modules()
            if len(text.splitlines()) > MOST_LINES_OF_A_FILE]  # fmt: skip
    for path, _, tree in modules():
        for function in functions(tree):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION:
                long.append(f"{path}:{function.lineno} {function.name}: {lines} lines")
    assert not long


def test_modules_and_what_they_offer_have_docstrings() -> None:
    bare = [str(path) for path, _, tree in modules() if not ast.get_docstring(tree)]
    for path, _, tree in modules():
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                overload = any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
                if not overload and not ast.get_docstring(node):
                    bare.append(f"{path}:{node.lineno} {node.name}")
    assert not bare


def test_no_mutable_state_in_modules() -> None:
    """Tables in capitals and `__all__` may be lists and dicts; anything else at module level may not."""
    found = []
    for path, _, tree in modules():
        found += [f"{path}:{node.lineno} global" for node in ast.walk(tree) if isinstance(node, ast.Global)]
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.append(node.target.id)
            value = getattr(node, "value", None)
            display = isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))
            made = isinstance(value, ast.Call) and ast.unparse(value.func) in {"list", "dict", "set", "defaultdict"}
            found += [
                f"{path}:{node.lineno} {name}"
                for name in names
                if (display or made) and name != "__all__" and not name.isupper()
            ]
    assert not found


def test_no_stubs() -> None:
    found = [f"{path}: {word}" for path, text, _ in modules() for word in re.findall(r"\b(?:TODO|FIXME)\b", text)]
    for path, _, tree in modules():
        raised = (node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc)
        found += [f"{path}:{node.lineno}" for node in raised if "NotImplementedError" in ast.unparse(node)]
    assert not found


def test_public_names_exist_once_each() -> None:
    for path, _, _ in modules():
        if path.name == "__init__.py":
            module = importlib.import_module(".".join(path.parent.parts))
            names = list(getattr(module, "__all__", []))
            assert len(names) == len(set(names)), path
            assert [name for name in names if not hasattr(module, name)] == [], path


def test_every_package_has_an_init_file() -> None:
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_tests_lie_where_their_source_does() -> None:
    folders = {path.parent.relative_to(ROOT / "tests").parts[:1] for path in (ROOT / "tests").rglob("*.py")} - {()}
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    assert {folder for (folder,) in folders} <= packages | TEST_FOLDERS_WITHOUT_A_PACKAGE


def test_the_drawn_tree_of_errors_is_the_real_one() -> None:
    drawn = dict(re.findall(r"[├└]── (\w+) .*?(?:\(also an? (\w+)\))?$", errors.__doc__ or "", re.MULTILINE))
    real = {
        error.__name__: error.__bases__[1].__name__
        for error in vars(errors).values()
        if isinstance(error, type) and error.__bases__[0] is errors.TapestreamError
    }
    assert drawn == real


def test_help_is_the_table_of_contents() -> None:
    listed = re.findall(r"^    (\w[\w, ]*?)  +\S", tapestream.__doc__ or "", re.MULTILINE)
    named = [name for line in listed for name in line.split(", ")]
    assert sorted(named) == sorted(tapestream.__all__)


def test_constraints_pin_every_requirement_exactly() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    assert all(re.fullmatch(r"[\w.-]+==\d[\w.]*", line) for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [name for extra in project["optional-dependencies"].values() for name in extra]
    names = {re.split(r"[\[<>=~! ]", requirement)[0].lower() for requirement in wanted} - {"tapestream"}
    assert names <= pins


def test_make_bench_runs_every_benchmark_or_says_why_not() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for path in (ROOT / "benchmarks").glob("*.py"):
        if '"__main__"' in path.read_text() and path.stem not in ("readme", "loop_peer"):
            assert re.search(rf"\b{path.stem}\b", makefile), path


def test_accelerators_are_named_in_one_place() -> None:
    """What asks ``torch.cuda`` knows one kind of device."""
    named = re.compile(r"\btorch\.(?:cuda|xpu|accelerator|Stream|Event)\b")
    code = {path: "\n".join(map(ast.unparse, tree.body[1:])) for path, _, tree in modules()}
    found = [str(p) for p, text in code.items() if named.search(text) and "accelerator" not in p.parts]
    # Their annotations: what is passed through.
    assert found == ["tapestream/executor/doubts.py", "tapestream/executor/engines/streams.py"]


def test_memory_without_a_file_is_this_process_s_own() -> None:
    """``mmap.mmap(-1, n)`` is shared with forked children: see `own_pages`."""
    shared = re.compile(r"mmap\.mmap\(-1")
    found = [str(path) for path, _, tree in modules() if shared.search(ast.unparse(tree))]
    assert found == ["tapestream/system/pages.py"]


FACTORIES = {"arange", "as_tensor", "empty", "full", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"}


def test_tensors_of_our_own_name_their_device() -> None:
    """Else they would lie where the user's ``torch.set_default_device`` says. Models and batches are the user's."""
    theirs = {"cli", "models"}
    calls = [
        (path, node)
        for path, _, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and theirs.isdisjoint(path.parts)
    ]
    assert [
        f"{path}:{node.lineno}"
        for path, node in calls
        if ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ] == []


OF_SOME_SYSTEMS = re.compile(
    r"fcntl|resource|msvcrt|filelock|flock|lockf|CDLL|mallopt|malloc_trim|mallinfo2|madvise|syscall|sync_file_range|statvfs|"
    r"fdatasync|pread|pwrite|preadv|pwritev|posix_\w+|sched_\w+|register_at_fork|getrlimit|setrlimit|rlimit|st_blocks|"
    r"RLIM\w+|O_DIRECT|O_DIRECTORY|O_CLOEXEC|O_NOFOLLOW|O_TMPFILE|O_BINARY|O_TEMPORARY|MADV_\w+|MAP_\w+|PROT_\w+|"
    r"SIGUSR1|SIGUSR2|SIGHUP|libc_ver|PAGESIZE"
)


def test_what_some_systems_lack_is_named_in_one_place() -> None:
    """Elsewhere it would work on Linux alone: see docs/platforms.md."""
    found = []
    for path, _, tree in modules():
        if path.parts[1] == "system":
            continue
        for node in ast.walk(tree):
            names = [name.name for name in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            names += [node.attr] if isinstance(node, ast.Attribute) else []
            files = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
            named = [name for name in names if OF_SOME_SYSTEMS.fullmatch(name)]
            named += [name for name in files if re.match(r"/proc\b|/sys/", name)]
            found += [f"{path}: {name}" for name in named]
    assert found == []
