"""The door: Hydra, recipes, overrides, and rules that concern several sections of the settings.

`CONF` and `RECIPES`, the groups of settings and the recipes, lie beside the package in a checkout, and in it when it is
installed.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"
RECIPES = HERE / "recipes" if (HERE / "recipes").is_dir() else HERE.parent / "recipes"
