"""Puts the Go program into the wheel, as deploy/release/wheel asks: MEANDER_WHEEL is a folder with bin/meander and
share, MEANDER_WHEEL_TAG says for which machines. Without them the wheel has the client alone."""

import os
import pathlib
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Program(BuildHookInterface):  # type: ignore[type-arg]
    """The hook that pyproject.toml names."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or not (given := os.environ.get("MEANDER_WHEEL")):
            return
        folder = pathlib.Path(given).absolute()
        if not (folder / "bin/meander").is_file():
            raise FileNotFoundError(f"MEANDER_WHEEL: {folder} has no bin/meander")
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + os.environ["MEANDER_WHEEL_TAG"]
        build_data["shared_scripts"][str(folder / "bin/meander")] = "meander"
        build_data["shared_data"][str(folder / "share")] = "share"
