"""A family or a pipeline of one's own, of a Python file that the worker is told: FILE.py:NAME."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from .family import Family
from .faults import Fault
from .folder import Folder
from .whole import Pipeline

_OF_FAMILIES = ("slug", "parts", "velocity")
_OF_PIPELINES = ("__call__",)


def load(given: str, folder: Folder, trust: bool = False) -> Family:
    """Returns the family of a folder by FILE.py:NAME: a subclass of Family, or a pipeline, a subclass of diffusers'
    DiffusionPipeline, which is computed as a whole. Its file may have the classes of networks that the folder names by
    the file. Fault of class config: what the file or the class lacks."""
    path, _, name = given.rpartition(":")
    file = Path(path)
    if file.suffix != ".py" or not name.isidentifier():
        raise Fault("config", f"--family: {given}; must be FILE.py:NAME, such as my_model.py:MyModel")
    cls = getattr(_module(file), name, None)
    if not isinstance(cls, type):
        here = [n for n, v in vars(sys.modules[file.stem]).items() if isinstance(v, type) and v.__module__ == file.stem]
        raise Fault("config", f"--family: {file}: no class {name}; it has {', '.join(here) or 'none'}")
    pipelines = importlib.import_module("diffusers").DiffusionPipeline
    base, needs = (pipelines, _OF_PIPELINES) if issubclass(cls, pipelines) else (Family, _OF_FAMILIES)
    if not issubclass(cls, base):
        raise Fault(
            "config",
            f"--family: {file}: {name}: must be a subclass of meander.torch.family.Family, or of "
            "diffusers.DiffusionPipeline",
        )
    has = {n for c in cls.__mro__ if c not in base.__mro__ for n, v in vars(c).items() if v}
    if lacks := [n for n in needs if n not in has and not issubclass(cls, Pipeline)]:
        raise Fault("config", f"--family: {file}: {name}: lacks {', '.join(lacks)}")
    try:
        if base is pipelines:
            family: Family = Pipeline(folder, trust, cls)
        else:
            family = cls(folder, trust) if issubclass(cls, Pipeline) else cls(folder)
    except (Fault, AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
        why = e if isinstance(e, Fault) else f"{type(e).__name__}: {e}"
        raise Fault("config", f"--family: {file}: {name}: {why}") from e
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    family.flags = (f"family-{name}-{digest[:12]}", *("trust-class",) * trust)
    return family


def _module(file: Path) -> Any:
    """The module of a file, by whose name folders name its classes."""
    known = sys.modules.get(file.stem)
    if known is not None and getattr(known, "__file__", None) == str(file.resolve()):
        return known
    if not file.is_file():
        raise Fault("config", f"--family: {file}: no such file")
    other = known or importlib.util.find_spec(file.stem)
    if other and getattr(other, "origin", None) != str(file.resolve()):
        raise Fault("config", f"--family: {file}: a package has the name {file.stem}; name the file otherwise")
    spec: Any = importlib.util.spec_from_file_location(file.stem, file.resolve())
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:  # of any kind, by what is wrong with it
        del sys.modules[file.stem]
        raise Fault("config", f"--family: {file}: cannot be imported: {type(e).__name__}: {e}") from e
    return module
