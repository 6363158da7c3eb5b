"""The wheel and the source distribution that make python-wheel has built, and the wheel on each Python that is here:
the program and the package, without the repository and without Go."""

import email
import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import uuid
import zipfile

import pytest
from conftest import ENVIRONMENT

import meander

HERE = pathlib.Path(__file__).parent
if not (DIST := os.environ.get("MEANDER_DIST")):
    pytest.skip(
        "MEANDER_DIST names no folder with a built wheel: 'make python-wheel' builds one", allow_module_level=True
    )
(WHEEL,), (SOURCES,) = (list(pathlib.Path(DIST).glob(end)) for end in ("*.whl", "*.tar.gz"))
INFO = f"meander_rl-{meander.__version__}.dist-info/"
DATA = f"meander_rl-{meander.__version__}.data/"
# Of a user, not of these tests: no PYTHON* that leads back to the repository.
CLEAN = {k: v for k, v in ENVIRONMENT.items() if not k.startswith("PYTHON")}


@pytest.fixture(scope="module")
def wheel():
    with zipfile.ZipFile(WHEEL) as archive:
        yield {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def metadata(wheel):
    return email.message_from_bytes(wheel[INFO + "METADATA"])


def sources():
    package = HERE.parent / "meander"
    files = (
        pathlib.Path(folder, name)
        for folder, _, names in os.walk(package, followlinks=True)  # a link leads to schemas/vectors
        for name in names
        if name.endswith((".py", ".json", ".md", "py.typed"))
    )
    return {p.relative_to(package.parent).as_posix(): p.read_bytes() for p in files}


def test_wheel_has_the_program(wheel):
    data = {name.removeprefix(DATA): data for name, data in wheel.items() if name.startswith(DATA)}
    assert data.pop("scripts/meander")[:4] in (b"\x7fELF", b"\xcf\xfa\xed\xfe")
    assert {"data/share/man/man1/meander-run.1", "data/share/bash-completion/completions/meander"} <= data.keys()
    assert all(re.match(r"data/share/(man/man1/meander[a-z-]*\.1$|[a-z-]+/[a-z_.-]+/_?meander)", name) for name in data)


def test_wheel_has_the_package_and_nothing_else(wheel):
    wheel = {name: data for name, data in wheel.items() if not name.startswith(DATA)}
    package, of_wheel = sources(), {name for name in wheel if name.startswith(INFO)}
    assert {name: data for name, data in wheel.items() if name not in of_wheel} == package
    assert of_wheel == {INFO + name for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert wheel[INFO + "licenses/LICENSE"] == (HERE.parent / "LICENSE").read_bytes()


def test_sources_have_what_builds_the_wheel_and_nothing_else():
    with tarfile.open(SOURCES) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        assert not {m.name for m in archive.getmembers() if m.uid or m.gid or m.mode & 0o022}
    assert names == {*sources(), "LICENSE", "README.md", "hatch_build.py", "pyproject.toml", "PKG-INFO"}


def test_metadata_is_complete(metadata):
    assert metadata["Name"] == "meander-rl" and metadata["Version"] == meander.__version__
    assert metadata["Metadata-Version"] == "2.4"
    assert metadata["License-Expression"] == "Apache-2.0" and metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.10" and metadata["Description-Content-Type"] == "text/markdown"
    module = re.search(r"^module (.*)$", (HERE.parents[3] / "go.mod").read_text(), re.MULTILINE)[1]
    urls = dict(u.split(", ") for u in metadata.get_all("Project-URL"))
    assert urls.keys() == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    for name, url in urls.items():
        path = url.removeprefix(f"https://{module}")
        assert path != url, f"{name}: {url} is not of the repository in go.mod"
        file = re.sub(r"^/(blob|tree)/main/", "", path)
        assert path in ("", "/issues") or (HERE.parents[3] / file).exists(), f"{name}: {url} is not there"


def test_readme_reads_well_without_the_repository(metadata):
    text = metadata.get_payload()
    assert "pip install meander-rl" in text and "./pkg/client" not in text and "<!--" not in text
    assert "## Tests" not in text
    assert all("://" in target for target in re.findall(r"\]\(([^)]+)\)", text)), "links lead out of the page"


def interpreter(version):
    """A Python of that version which can make environments: of PATH, pyenv or uv; or why there is none."""
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    candidates = [
        shutil.which(f"python{version}"), *sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python"), reverse=True)
    ]
    if uv := shutil.which("uv"):
        found = subprocess.run([uv, "python", "find", "--no-python-downloads", version], capture_output=True, text=True)
        candidates.append(found.stdout.strip())
    for candidate in filter(None, candidates):
        probe = subprocess.run(
            [candidate, "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True, text=True, env=CLEAN
        )
        if probe.stdout.strip() == version:
            return candidate
    pytest.skip(
        f"the wheel is not tried on Python {version}, which is not here with venv: neither in PATH, nor of pyenv or uv"
    )


def in_venv(python, folder):
    """The Python of a fresh environment that has the wheel."""
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True, env=CLEAN, cwd=folder)
    program = folder / "venv/bin/python"
    installed = subprocess.run(
        [program, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", WHEEL], capture_output=True,
        text=True, env=CLEAN, cwd=folder
    )
    _, found, missing = installed.stderr.partition("No matching distribution found for")
    if found and "meander" not in missing:
        pytest.skip(f"the wheel is not tried: pip reaches no index for what it needs\n{installed.stderr}")
    assert installed.returncode == 0, installed.stderr
    return program


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_wheel_works(version, url, tmp_path):
    """In an environment of its own, without the repository on the path: a batch is read, and commands start or say
    what to install."""
    python = in_venv(interpreter(version), tmp_path)
    shutil.copy(HERE / "smoke.py", tmp_path)
    out = subprocess.run(
        [python, "-I", "smoke.py", url, "smoke" + uuid.uuid4().hex[:8]], capture_output=True, text=True, env=CLEAN,
        cwd=tmp_path, timeout=600
    )
    assert out.returncode == 0, out.stderr
    said, place, python_version = out.stdout.split()
    assert said == meander.__version__ and python_version.startswith(version + ".")
    assert tmp_path in pathlib.Path(place).parents and "site-packages" in place
    commands = {
        "meander-track --help": "RUN",
        "meander-train --prompts p": "pip install 'meander-rl[train]'",
        "meander-torch --model m --socket s": "pip install 'meander-rl[torch]'",
        "meander-scorer clipscore --try i p": "pip install 'meander-rl[rewards]'",
    }
    for command, says in commands.items():
        name, *args = command.split()
        out = subprocess.run(
            [python.with_name(name), *args], capture_output=True, text=True, env=CLEAN, cwd=tmp_path, timeout=600
        )
        assert (out.returncode == 0) == ("--help" in args) and says in out.stdout + out.stderr, f"{command}: {out}"


def test_first_minute(tmp_path):
    """From an empty folder, as a user who has nothing else: no Go, no repository, a home of its own."""
    program = in_venv(sys.executable, tmp_path).with_name("meander")
    (here := tmp_path / "here").mkdir()

    def run(*args):
        env = {"HOME": str(tmp_path / "home"), "PATH": str(program.parent)}
        out = subprocess.run([program.name, *args], capture_output=True, text=True, env=env, cwd=here, timeout=60)
        assert out.returncode == 0, out.stderr
        return out.stdout

    assert run("version").startswith(f"meander {meander.__version__}")
    run("run", "-n", "4", 'a blue sign that says "4071"')
    assert len([*here.glob("meander-out/*/*.png")]) == 5
    run("examples")
    out = run("run", "-n", "2", "--reward", "glyph", "--prompts", "deploy/demo/prompts.txt")
    assert "4 of 4 groups complete" in out
    run("verify")


def test_wheel_is_typed(tmp_path):
    """A program of a user passes mypy --strict against the installed package."""
    python = in_venv(sys.executable, tmp_path)
    shutil.copy(HERE / "smoke.py", tmp_path)
    out = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "smoke.py"], capture_output=True,
        text=True, env=CLEAN, cwd=tmp_path
    )
    assert out.returncode == 0, out.stdout + out.stderr
