"""The shape of the house: who may import whom, what is linked, how long a file may be, and what never gets in."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "luthier"
BESIDE = ("export", "migrate", "privacy", "report", "ui")
"""Folders beside the core, each of which knows the core and itself."""
FOLDERS = ("common", "modalities", *BESIDE)
LONGEST = 400


def python_files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def module_of(file: Path) -> str:
    """`common/data/plan.py` -> `luthier.common.data.plan`"""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(file: Path) -> set[str]:
    """Full names of all modules that a file imports, anywhere in it; `from a import b` gives both a and a.b."""
    package = module_of(file).split(".") if file.name == "__init__.py" else module_of(file).split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
    return found


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def ours(names: set[str]) -> set[str]:
    return {name for name in names if within(name, PACKAGE, *FOLDERS) and name != PACKAGE}


def relative(files: list[Path]) -> list[str]:
    return [str(file.relative_to(ROOT)) for file in files]


# ------------------------------------------------------------------------------------------------ imports


def test_the_reader_of_imports_understands_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "modalities" / "asr" / "x.py"
    file.parent.mkdir(parents=True)
    lines = (
        "import a.b",
        "from ...common import task",
        "from ..llm.y import z",
        "from . import w",
        "def f():",
        " import q",
    )
    file.write_text("\n".join(lines))
    assert imports(file) == {
        "a.b", "luthier.common", "luthier.common.task", "luthier.modalities.llm.y", "luthier.modalities.llm.y.z",
        "luthier.modalities.asr", "luthier.modalities.asr.w", "q",
    }  # fmt: skip


@pytest.mark.parametrize("file", relative(python_files("common")))
def test_common_imports_nothing_of_ours_outside_common(file: str) -> None:
    others = {name for name in ours(imports(ROOT / file)) if not within(name, f"{PACKAGE}.common")}
    assert not others - {f"{PACKAGE}.__version__"}


@pytest.mark.parametrize("file", relative(python_files("modalities")))
def test_a_modality_imports_common_and_itself(file: str) -> None:
    modality = Path(file).parts[1]
    allowed = (f"{PACKAGE}.common", f"{PACKAGE}.modalities.{modality}")
    assert not {name for name in ours(imports(ROOT / file)) if not within(name, *allowed)}


@pytest.mark.parametrize("file", relative(python_files(*BESIDE)))
def test_what_is_beside_the_core_imports_common_and_itself(file: str) -> None:
    allowed = (f"{PACKAGE}.common", f"{PACKAGE}.{Path(file).parts[0]}")
    assert not {name for name in ours(imports(ROOT / file)) if not within(name, *allowed)}


def test_nothing_imports_the_tests() -> None:
    for file in python_files(*FOLDERS):
        names = imports(file)
        assert not {name for name in names if within(name, "tests", "pytest", "hypothesis", f"{PACKAGE}.tests")}, file


def test_the_library_imports_itself_relatively() -> None:
    """So that it works under any name, and a fork beside it is never mixed with it."""
    for file in python_files(*FOLDERS):
        for node in ast.walk(parsed(file)):
            absolute = isinstance(node, ast.ImportFrom) and not node.level and node.module
            names = [node.module] if absolute else [a.name for a in node.names] if isinstance(node, ast.Import) else []  # type: ignore[union-attr]
            assert not [name for name in names if name and within(name, PACKAGE, *FOLDERS)], file


def losses_and_models(name: str) -> list[str]:
    """Files of this name, and those in folders of it."""
    found = [file for file in python_files("modalities") if name in (file.stem, file.parent.name)]
    return relative([file for file in found if file.stem != "__init__"])


LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


@pytest.mark.parametrize("file", losses_and_models("losses"))
def test_a_loss_knows_neither_lightning_nor_the_recipe(file: str) -> None:
    names = imports(ROOT / file)
    assert not {name for name in names if within(name, *LIGHTNING, f"{PACKAGE}.common.recipe")}
    assert not {name for name in names if name.startswith(PACKAGE) and "config" in name.split(".")}


@pytest.mark.parametrize("file", losses_and_models("model"))
def test_a_model_knows_neither_lightning_nor_the_common_recipe(file: str) -> None:
    """Its own kind's `config` it may know: that is a plain value."""
    names = imports(ROOT / file)
    unwanted = (*LIGHTNING, f"{PACKAGE}.common.recipe", f"{PACKAGE}.common.task")
    assert not {name for name in names if within(name, *unwanted)}


def test_there_are_losses_and_models_to_look_at() -> None:
    assert losses_and_models("losses")
    assert losses_and_models("model")


def imported_at_once(file: Path) -> set[str]:
    """Names imported when the module itself is imported: not inside functions, not for type checkers only."""
    found: set[str] = set()
    todo: list[ast.AST] = [parsed(file)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module)
        todo += ast.iter_child_nodes(node)
    return found


HEAVY = ("torch", "lightning", "transformers", "peft", "datasets", "numpy")


@pytest.mark.parametrize("name", ["recipe", "kinds", "errors", "console", "cli"])
def test_what_the_command_line_needs_at_once_is_light(name: str) -> None:
    assert not {name for name in imported_at_once(ROOT / "common" / f"{name}.py") if within(name, *HEAVY)}


@pytest.mark.parametrize("file", relative([f for f in python_files("modalities") if f.stem in ("config", "sections")]))
def test_the_recipe_of_a_kind_is_light(file: str) -> None:
    assert not {name for name in imported_at_once(ROOT / file) if within(name, *HEAVY)}


# ------------------------------------------------------------------------------------------------ folders


def root_packages() -> list[str]:
    named = {*FOLDERS, "recipes"}
    return sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name in named)


def test_every_folder_of_the_package_has_its_link() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / "src" / PACKAGE).iterdir() if path.is_symlink()}
    for name in [*root_packages(), "__init__.py", "py.typed"]:
        assert links.get(name) == f"../../{name}", name
    for name, target in links.items():
        assert (ROOT / "src" / PACKAGE / target).exists(), name


def test_src_holds_only_links() -> None:
    tracked = [name for name in tracked_names() if name.startswith("src/")]
    assert all((ROOT / name).is_symlink() for name in tracked)
    assert {Path(name).parent.as_posix() for name in tracked} <= {f"src/{PACKAGE}"}


def test_every_folder_with_code_is_a_package() -> None:
    """Else a wheel would lack it."""
    for folder in FOLDERS:
        holding = {file.parent for file in python_files(folder)}
        bare = [str(path.relative_to(ROOT)) for path in holding if not (path / "__init__.py").is_file()]
        assert not bare


def test_every_kind_has_its_task_and_config() -> None:
    for config in (ROOT / "modalities").glob("*/*/config.py"):
        assert config.with_name("task.py").is_file()
        assert "class Config(" in config.read_text(encoding="utf-8")
        assert re.search(r"^class Task\(", config.with_name("task.py").read_text(encoding="utf-8"), re.MULTILINE)


def test_recipes_are_yaml_only_and_lie_by_modality() -> None:
    for file in (ROOT / "recipes").rglob("*"):
        if file.is_file():
            assert file.suffix == ".yaml"
            assert file.parent.parent == ROOT / "recipes"
            assert (ROOT / "modalities" / file.parent.name).is_dir()


def test_tests_mirror_the_folders() -> None:
    allowed = {*FOLDERS, "golden", "recipes", "benchmarks", "faults"}
    assert {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"} <= allowed


# ------------------------------------------------------------------------------------------------ sizes


TOO_LONG: set[str] = set()
"""Files known to be over the limit; one that is no longer must leave this list."""


def test_no_file_is_too_long() -> None:
    long = [file for file in python_files(*FOLDERS) if file.read_text(encoding="utf-8").count("\n") > LONGEST]
    assert set(relative(long)) == TOO_LONG


def depth(node: ast.AST, at: int = 0) -> int:
    """Deepest nesting of blocks inside a function."""
    blocks = ast.If | ast.For | ast.While | ast.With | ast.Try | ast.AsyncFor | ast.AsyncWith | ast.Match
    deepest = at
    for child in ast.iter_child_nodes(node):
        # `elif` is an If within the orelse of an If, and no deeper to read.
        chained = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child, at + (isinstance(child, blocks) and not chained)))
    return deepest


def test_nesting_stays_within_four() -> None:
    for file in python_files(*FOLDERS):
        functions = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef)]
        assert not [node.name for node in functions if depth(node) > 4], file


# ------------------------------------------------------------------------------------------------ what never gets in


def tracked_names() -> list[str]:
    asked = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if asked.returncode:
        pytest.skip("not a git checkout")
    return [name for name in asked.stdout.split("\0") if name]


def tracked_texts() -> list[tuple[str, str]]:
    found = []
    for name in tracked_names():
        path = ROOT / name
        if path.is_symlink() or not path.is_file():
            continue
        try:
            found.append((name, path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


# In pieces, so that this file does not find itself.
REGISTRY = re.compile(
    "|".join([r"py" r"pi\.org", r"python" r"hosted\.org", r"registry\.npm" r"js\.org", r"anaconda" r"\.org",
              r"--(extra-)?index" r"-url", r"PIP_(EXTRA_)?INDEX" r"_URL", r"artifact" r"ory"])
)  # fmt: skip
MACHINE = re.compile(r"(?<![\w.~}$)/-])/(work|home|root|Users|mnt|data|scratch)/[\w.]+")


def test_no_host_of_a_package_registry_is_named() -> None:
    found = [f"{name}: {hit.group()}" for name, text in tracked_texts() for hit in REGISTRY.finditer(text)]
    assert not found


def test_the_registry_of_this_machine_is_not_named() -> None:
    kinds = ("INDEX", "EXTRA_INDEX", "DEFAULT_INDEX")
    settings = [
        os.environ.get(f"{tool}_{kind}{end}", "") for tool in ("PIP", "UV") for kind in kinds for end in ("_URL", "")
    ]
    home = Path.home()
    files = (Path("/etc/pip.conf"), home / ".pip" / "pip.conf", home / ".config" / "pip" / "pip.conf")
    settings += [file.read_text() for file in files if file.is_file()]
    hosts = {host for text in settings for host in re.findall(r"https?://(?:[^/@\s]*@)?([\w.-]+)", text)}
    found = [name for name, text in tracked_texts() for host in hosts if host in text]
    assert not found


def test_no_path_of_a_machine_is_named() -> None:
    found = [f"{name}: {hit.group()}" for name, text in tracked_texts() for hit in MACHINE.finditer(text)]
    assert not found


def test_the_search_for_paths_finds_them_and_nothing_else() -> None:
    folder = "work"
    assert MACHINE.search(f"see '/{folder}/main'")
    assert MACHINE.search(f"data={'/home'}/me/x")
    for harmless in ("tests/data/x", "https://host/data/x", "${HOME}/data/x", "../data/x", "~/data/x", "a/root/b"):
        assert not MACHINE.search(harmless), harmless


def test_nothing_made_by_running_is_tracked() -> None:
    endings = (".pyc", ".pt", ".ckpt", ".safetensors", ".egg-info", ".so", ".whl")
    assert not [name for name in tracked_names() if name.endswith(endings) or "__pycache__" in name]
    assert not [name for name, text in tracked_texts() if len(text) > 500_000]
