"""The shape of the house: which way the arrows point, what is shipped, and what the files may be called."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("elastic_runner", "checkpoint", "fault_injection")
MAY_IMPORT = {
    "elastic_runner": {"elastic_runner", "checkpoint", "fault_injection", "progress", ""},
    "checkpoint": {"checkpoint", "progress"},
    "fault_injection": {"fault_injection", "progress"},
    "progress": set[str](),
    "": {"checkpoint", "progress"},
    "__main__": {"elastic_runner"},
}
NOT_PACKAGES = {"elastic_runner/worker_site"}
DATA = ("py.typed", "elastic_runner/devices/health_policy.yaml", "fault_injection/simulated_nvml.c")


def product() -> list[Path]:
    """Every module of the product."""
    return sorted([*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))])


def written() -> list[Path]:
    """Every text file that people wrote here, as git sees the tree; the product alone where there is no git."""
    if not (ROOT / ".git").exists():
        return product()
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and path.suffix in {"", ".py", ".md", ".toml", ".txt", ".yaml", ".yml"}]


def name_of(path: Path) -> str:
    """The module's name inside goodrun; "" is the root package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path, *, at_import: bool) -> frozenset[str]:
    """The modules of goodrun that a module imports, anywhere in it or only while it is being imported itself."""
    known = {name_of(p) for p in product()}
    package = path.relative_to(ROOT).parts[:-1]
    found: set[str] = set()
    for node in _statements(ast.parse(path.read_text(encoding="utf-8")), at_import=at_import):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
            elif (node.module or "").split(".")[0] == "goodrun":
                base = (node.module or "").split(".")[1:]
            else:
                continue
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                found.add(whole if whole in known else ".".join(base))
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.split(".")[0] == "goodrun"}
    return frozenset(found - {name_of(path)})


def _statements(tree: ast.AST, *, at_import: bool) -> list[ast.AST]:
    found: list[ast.AST] = []
    for node in ast.iter_child_nodes(tree):
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        found += [node, *_statements(node, at_import=at_import)]
    return found


@pytest.mark.parametrize("path", product(), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_one_way(path: Path) -> None:
    """elastic_runner may know the others; checkpoint and fault_injection know only the page; the page knows nobody."""
    room = name_of(path).split(".")[0]
    for target in imports_of(path, at_import=False):
        assert target.split(".")[0] in MAY_IMPORT[room], f"{path.relative_to(ROOT)} imports {target or 'the root package'}"


def test_there_are_no_import_circles() -> None:
    """No module waits, while being imported, for one that waits for it."""
    graph = {name_of(path): imports_of(path, at_import=True) for path in product()}
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(graph.get(name, frozenset())):
                walk(target, (*trail, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_the_root_holds_the_public_face_and_the_page_alone() -> None:
    """Any other module at the root would be shipped as goodrun.<name>."""
    assert sorted(path.name for path in ROOT.glob("*.py")) == ["__init__.py", "__main__.py", "progress.py"]


def test_every_folder_with_code_is_a_listed_package() -> None:
    """A folder that pyproject.toml does not list is missing from the wheel, without a word."""
    listed = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert listed is not None
    packages = set(re.findall(r'"([^"]+)"', listed[1]))
    folders = {path.parent.relative_to(ROOT).as_posix() for path in product()} - NOT_PACKAGES
    assert packages == {"goodrun" if folder == "." else "goodrun." + folder.replace("/", ".") for folder in folders}
    for folder in folders:
        assert (ROOT / folder / "__init__.py").is_file(), folder


def test_the_wheel_has_every_module(tmp_path: Path) -> None:
    """What is installed from a wheel is what is here, the worker's site folder and the typing mark included; tests and scripts are not."""
    source = tmp_path / "source"  # a copy, because setuptools builds in the tree it is given
    for path in [*product(), *(ROOT / name for name in (*DATA, "pyproject.toml", "LICENSE", "README.md"))]:
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    built = subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("goodrun-*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert shipped == {f"goodrun/{name}" for name in DATA} | {f"goodrun/{path.relative_to(ROOT).as_posix()}" for path in product()}


def test_importing_goodrun_imports_nothing_heavy() -> None:
    """`import goodrun` in a script that never trains costs nothing; and the plan of chaos brings no injector along."""
    code = (
        "import sys, goodrun, goodrun.fault_injection\n"
        "print([m for m in ('torch', 'numpy', 'yaml', 'rich', 'psutil', 'goodrun.fault_injection.injectors') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("path", product(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_is_and_stays_small(path: Path) -> None:
    """A name that tells, one opening sentence, at most 420 lines."""
    text = path.read_text(encoding="utf-8")
    assert path.stem not in {"utils", "util", "helpers", "common", "misc"}
    assert len(text.splitlines()) <= 420
    assert ast.get_docstring(ast.parse(text))
    assert "TODO" not in text and "FIXME" not in text


def test_no_file_names_a_place_that_only_we_have() -> None:
    """No path of the machine it was written on, and no host of a package registry."""
    ours = re.compile("|".join(["/" + "work/", r"\." + "library", "pypi" + r"\.", "python" + "hosted", "/opt/" + "wheels"]))
    for path in written():
        found = ours.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(ROOT)} has {found[0]!r}" if found else ""
