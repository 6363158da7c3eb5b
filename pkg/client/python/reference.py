"""Writes the reference of the package, from its docstrings, by pdoc.

    python reference.py FOLDER
"""

import importlib.abc
import importlib.machinery
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy.typing
import pdoc
import pdoc.docstrings

# What `import meander` gives, and what stands beside it.
MODULES = (
    "meander", "meander.client.control", "meander.client.sync", "meander.data.contract", "meander.data.events",
    "meander.plugs.accelerate", "meander.plugs.dataset", "meander.plugs.track",
    "meander.plugs.trl", "meander.plugs.verl", "meander.torch", "meander.train"
)
# What modules import for trainers. Where it is not installed it is stood in for.
OPTIONAL = (
    "PIL", "accelerate", "diffusers", "matplotlib", "peft", "safetensors", "torch", "tqdm",
    "transformers", "trl", "verl"
)


class Absent:
    """Something of a package that is not installed: a base class without members, a decorator that changes nothing."""

    def __init__(self, name: str):
        self._name = name
        self.__module__, _, self.__qualname__ = name.rpartition(".")

    def __repr__(self) -> str:
        return self._name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__ray_actor_class__":
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __getitem__(self, key: Any) -> "Absent":
        return Absent(f"{self}[{shown(key)}]")

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __or__(self, other: Any) -> "Absent":
        return Absent(f"{self} | {shown(other)}")

    def __ror__(self, other: Any) -> "Absent":
        return Absent(f"{shown(other)} | {self}")


def shown(of: Any) -> str:
    """A type as annotations name it."""
    return of.__qualname__ if isinstance(of, type) and not isinstance(of, types.GenericAlias) else repr(of)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of OPTIONAL that nothing else has found."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(
            name, self, is_package=True
        ) if name.partition(".")[0] in OPTIONAL else None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = lambda name: getattr(Absent(module.__name__), name)  # type: ignore[method-assign]


def markdown(docstring: str) -> str:
    """A docstring with lists where lines begin with names of arguments, attributes or errors."""
    return re.sub(r"(?<=[.:;\n]\n)(?=(\w+(=\w+)?(, \w+(=\w+)?)*): )", r"\n- ", docstring)


def main(folder: str) -> None:
    warnings.simplefilter("error")  # such as an annotation without a meaning
    warnings.filterwarnings("ignore", r"Cannot determine where .*\.from is taken from")  # a field, and a keyword
    sys.meta_path.append(Finder())
    # By name: what they stand for takes lines.
    numpy.typing.ArrayLike = Absent("numpy.typing.ArrayLike")  # type: ignore[assignment, misc]
    numpy.typing.NDArray = Absent("numpy.typing.NDArray")  # type: ignore[assignment, misc]
    convert = pdoc.docstrings.convert
    pdoc.docstrings.convert = lambda docstring, *args: markdown(convert(docstring, *args))
    pdoc.docstrings.convert.cache_clear = convert.cache_clear
    pdoc.render.configure(
        docformat="markdown",
        edit_url_map={"meander": "https://github.com/meander-rl/meander/blob/main/pkg/client/python/meander/"}
    )
    pdoc.pdoc(*MODULES, "!__main__$", output_directory=Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
