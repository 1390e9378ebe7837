"""The settings of a chain of jobs."""

from typing import Annotated

from pydantic import Field, Strict

from distill.config.model import SEEDS, Settings, setting


class StageConfig(Settings):
    """One job, or one for each of several seeds."""

    recipe: str = Field(description="Recipe of the stage.")
    settings: list[str] = setting(
        None, "Settings as on the command line; {NAME} is the folder of stage NAME.", factory=list
    )
    seeds: list[Annotated[int, Strict(), Field(ge=0, le=SEEDS)]] = setting(
        None, "Run the stage once with each of these seeds; none is the seed of the recipe.", factory=list
    )


class ChainConfig(Settings):
    """Stages by name, in their order, and which of them score which model of the table."""

    stages: dict[str, StageConfig] = setting(None, "Stages by name, in their order.", factory=dict)
    table: dict[str, list[str]] = setting(None, "Stages by the name of the model that they score.", factory=dict)
    anchors: list[str] = setting(None, "Lines below the table, such as published scores.", factory=list)
