"""What the package promises to those who install it: documented names, and extras that bring what its modules
import."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

import meander

try:
    import tomllib
except ImportError:  # Python 3.10, for which pytest brings it
    import tomli as tomllib

HERE = pathlib.Path(__file__).parents[1]
MODULES = sorted((HERE / "meander").rglob("*.py"))
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
# packages whose name is not that of their module
REQUIRES = {
    "nats": "nats-py", "PIL": "pillow", "open_clip": "open_clip_torch", "ImageReward": "image-reward",
    "vllm_omni": "vllm-omni",
}  # fmt: skip
# Modules of an extra of another name: any of these brings what they import.
EXTRAS = {
    "media": ["images"], "conditions": ["images"], "batch": ["dataset"], "states": ["dataset"], "lane": ["trl", "verl"],
    "certify": ["trl", "verl"], "torch": ["torch", "omni"],
    "track": ["track", "wandb", "trackio", "dataset"], "rewards": ["rewards", "imagereward", "hpsv3"],
}  # fmt: skip


def imports(tree):
    """The packages that a module imports as it runs, at any depth: not those for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (a.name.partition(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            name = node.args[0]
            if isinstance(name, ast.Constant) and not name.value.startswith("meander"):
                yield name.value.partition(".")[0]
        yield from imports(node)


def names(requirements):
    """The packages of requirements; of nats-py[nkeys] both."""
    return {name for r in requirements for name in re.findall(r"^[\w.-]+|(?<=\[)[\w-]+", r)}


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.relative_to(HERE).as_posix())
def test_what_a_module_imports_is_required(file):
    parts = file.relative_to(HERE / "meander").parts
    name = parts[parts[0] in ("client", "data", "maths", "plugs")].removesuffix(".py")
    has = names(PROJECT["dependencies"]).union(*(names(OPTIONAL.get(extra, [])) for extra in EXTRAS.get(name, [name])))
    lacks = {
        p
        for p in imports(ast.parse(file.read_text()))
        if p not in sys.stdlib_module_names and REQUIRES.get(p, p) not in has
    }
    assert not lacks, f"pyproject.toml: no dependency or extra of {name} brings {', '.join(sorted(lacks))}"


def test_documents_name_extras_that_are_there():
    named = set()
    for file in [*MODULES, HERE / "README.md", *(HERE.parents[2] / "deploy/guide").glob("*.md")]:
        for brackets in re.findall(r"(?:meander-rl|pkg/client/python)\[([\w,-]+)\]", file.read_text()):
            named |= set(brackets.split(","))
    assert named and not named - OPTIONAL.keys()


def test_license_is_that_of_the_repository():
    assert (HERE / "LICENSE").read_bytes() == (HERE.parents[2] / "LICENSE").read_bytes()


def test_names_of_the_package_are_there():
    for name in meander.__all__:
        if name != "dataset":  # which needs torch
            assert getattr(meander, name) is not None


def undocumented(node, name, doc, inherited):
    """The public names in a module or class without a docstring. A variable may stand in the docstring of what has it;
    of what a base class has, a class says only what differs."""
    for c, after in zip(node.body, [*node.body[1:], None]):
        if isinstance(c, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names, own, said = [c.name], ast.get_docstring(c), ""
        elif isinstance(c, (ast.Assign, ast.AnnAssign)):
            targets = c.targets if isinstance(c, ast.Assign) else [c.target]
            names = [x.id for t in targets for x in getattr(t, "elts", [t]) if isinstance(x, ast.Name)]
            said = doc
            called = c.value.func if isinstance(c.value, ast.Call) else None
            # What is made of a documented function has its docstring; a setting its help.
            own = (after and ast.get_docstring(ast.Module([after], []))) or getattr(called, "id", "") in MAKERS
        else:
            continue
        for n in names:
            if n.startswith("_") or own or n in inherited or re.search(rf"\b{n}\b", said):
                continue
            yield f"{name}{n}"
        if isinstance(c, ast.ClassDef) and not c.name.startswith("_"):
            yield from undocumented(c, f"{name}{c.name}.", own or "", members(c))


MAKERS = {"waiting", "_streaming", "_groups", "_batches", "_connecting", "_setting"}
# Events have names that other classes have, too, and are no base classes.
CLASSES = {
    c.name: c for file in MODULES if file.name != "contract.py" for c in ast.walk(ast.parse(file.read_text()))
    if isinstance(c, ast.ClassDef)
}
# What base classes of other packages document.
ABROAD = {"RolloutReplica": {"launch_servers"}, "BaseRollout": {"update_weights"}, "JetStreamContext": {"get_msg"}}


def members(c):
    """The names that the base classes of a class have."""
    out = set()
    for base in (getattr(b, "id", getattr(b, "attr", "")) for b in c.bases):
        out |= ABROAD.get(base, set())
        if base in CLASSES and CLASSES[base] is not c:
            of = CLASSES[base]
            out |= members(of) | {n.name for n in of.body if hasattr(n, "name")}
            out |= {
                x.id for n in of.body if isinstance(n, (ast.Assign, ast.AnnAssign))
                for x in ast.walk(n) if isinstance(x, ast.Name)
            }
    return out


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.relative_to(HERE).as_posix())
def test_public_names_are_documented(file):
    tree = ast.parse(file.read_text())
    doc = ast.get_docstring(tree) or ""
    assert doc, "the module has no docstring"
    assert not list(undocumented(tree, "", doc, set()))


def test_reference_has_a_page_of_each_module(tmp_path):
    """Without the packages of extras, too; it ends at the first annotation or import that it cannot follow."""
    pytest.importorskip(
        "pdoc", reason="the reference is not written: pip install -r tests/requirements.txt brings pdoc"
    )
    out = subprocess.run(
        [sys.executable, HERE / "reference.py", tmp_path], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(HERE)}
    )
    assert out.returncode == 0, out.stderr
    for page in (
        "meander", "meander/client/sync", "meander/client/sync/policy", "meander/plugs/dataset",
        "meander/train/learner", "meander/plugs/trl", "meander/plugs/verl"
    ):
        assert (tmp_path / f"{page}.html").is_file(), page
    assert "Reader[meander.Batch]" in re.sub("<[^>]*>", "", (tmp_path / "meander/client/sync.html").read_text())


@pytest.mark.parametrize("lacks", [["torch"], ["torch", "PIL"], []])
def test_the_package_can_be_looked_at_without_extras(lacks):
    """help(meander) and from meander import * need nothing that an extra brings."""
    look = (
        "import sys, importlib.abc, pydoc\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {lacks!r}: raise ModuleNotFoundError(name)\n"
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *a: None if name in {lacks!r} else found(name, *a)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import meander\nfrom meander import *\n"
        "assert connect is meander.connect and 'publish prompts' in pydoc.render_doc(meander)\n"
        "assert set(meander.__all__) <= set(dir(meander))\n"
    )
    subprocess.run([sys.executable, "-c", look], check=True, env={**os.environ, "PYTHONPATH": str(HERE)})


@pytest.mark.parametrize("value, says", [("my run", "such as 'my-run'"), ("a/b c", "'a-b-c'"), ("", "64"), ("ü", "-")])
def test_a_name_that_is_none_is_refused_with_the_one_that_is_meant(value, says):
    """Before anything is stored: a wrong name would be a subject that nobody reads."""
    client = meander.Client.__new__(meander.Client)
    for ask in (
        lambda: client.publish(value, "a fox"), lambda: client.publish("r", "a fox", uid=value or "."),
        lambda: client.pause(value), lambda: client.status(value),
    ):
        with pytest.raises(ValueError, match="must be 1 to 64 characters of A-Z a-z 0-9 _ -") as fault:
            ask().send(None)
        assert says in str(fault.value)
    with pytest.raises(ValueError, match="run: "):
        client.advantages(value)
