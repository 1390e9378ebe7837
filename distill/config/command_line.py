"""Looks at the command line before Hydra does: for values that name nothing, and secrets."""

from pathlib import Path
from typing import Any

from distill.config.compose import build, group_of, register, written
from distill.config.settings import CONF, RECIPES, Config
from distill.config.sweep.index import SweepIndex
from distill.config.sweep.names import swept_overrides
from distill.runtime.errors import SettingError
from distill.runtime.redaction import masked, secrets_in

# Where Hydra begins a run folder; of nothing it would make the folder that the user is in.
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
# What makes Hydra itself write settings, into files or the names of folders.
WRITES = ("hydra.mode", "hydra.output_subdir", "override_dirname")
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"  # runs every value that is given
SWEEP = "MULTIRUN"  # Hydra's mode of several runs
# In an argument they make it possible that Hydra's mode is set, by the argument or by a recipe from elsewhere.
SETS_MODE = ("hydra.mode", "searchpath", SWEEP)
MAIN_RECIPE = "distilbert_gutenberg"  # of a command line that names none
# Either of them says what the run is, and so does a configuration of the user's own, which need not know that recipe.
SAYS_WHAT = ("recipe", "scale")


def with_recipe(arguments: list[str]) -> list[str]:
    """The same command line, with the main recipe where it names neither a recipe nor a scale.

    So `python -m distill corpus.path=BOOKS` is the main job: without a scale the defaults of the groups do not fit each
    other, and would want texts from the Hub. `scale=custom` gives these defaults alone.
    """
    flags = _flags(arguments)
    own = (flags.config_name, flags.config_path, flags.experimental_rerun)
    named = {each.key_or_group.partition("@")[0] for each in _parsed(arguments)}
    if named.intersection(SAYS_WHAT) or any(own) or flags.shell_completion:
        return arguments
    overrides = flags.overrides  # Hydra wants them in a row, whatever options are before and after
    at = arguments.index(overrides[0]) if overrides else len(arguments)
    return [*arguments[:at], f"+recipe={MAIN_RECIPE}", *arguments[at:]]


def checked(arguments: list[str]) -> list[str]:
    """The command line with its recipe, see `with_recipe`, after every look at it that comes before Hydra's.

    Raises:
        SettingError: a value that names nothing, or a secret that would be written.
    """
    arguments = with_recipe(arguments)
    check_overrides(arguments)
    check_secrets(arguments)
    return arguments


def composed(arguments: list[str]) -> Config:
    """The settings of the one run that a command line names, for commands beside `python -m distill` itself.

    Args:
        arguments: the command line: `+recipe=NAME`, NAME=VALUE, and --config-dir FOLDER; see `with_recipe`.

    Raises:
        SettingError: bad input, or a chain or a sweep, which are several runs.
    """
    register()
    arguments = checked(arguments)
    check_one_run(arguments)
    settings = compose_settings(arguments)
    if settings.get("chain") is not None:
        raise SettingError("this recipe is a chain, which is several runs: name the recipe of one of its stages")
    return build(settings, own_overrides(arguments))


def check_one_run(arguments: list[str]) -> None:
    """Raises SettingError where the command line, or a recipe that it names, makes this a sweep."""
    if any(each.is_sweep_override() for each in _parsed(arguments, strict=True)) or _may_sweep(arguments):
        raise SettingError(
            "this command is about one run: leave --multirun, lists of several values and recipes of sweeps out"
        )


def own_overrides(arguments: list[str]) -> list[str]:
    """The overrides among the arguments, without those of Hydra's own part."""
    return [each for each in _flags(arguments).overrides if not each.lstrip("+~").startswith(("hydra.", "hydra/"))]


def check_overrides(arguments: list[str]) -> None:
    """Refuse what Hydra would end in a traceback, or with files where nobody looks for them.

    Args:
        arguments: the command line after `python -m distill`.

    Raises:
        SettingError: a group with a value that can name no option of it, an empty run folder, or a folder of recipes
            that is not there.
    """
    folder = _flags(arguments).config_dir
    if folder is not None and not Path(folder).is_dir():
        raise SettingError(f"--config-dir {folder}: no such folder; correct the path")
    groups = {each.name for each in CONF.iterdir() if each.is_dir()} | {"recipe"}
    for override in _parsed(arguments):
        if override.is_sweep_override() or override.is_delete():
            continue
        name, value = override.key_or_group, override.value()
        masked({name: value})  # from here on no line that is written holds it
        listed = value if isinstance(value, list) else []
        if name in groups and (
            not isinstance(value, str | list | dict) or not all(isinstance(each, str) for each in listed)
        ):
            raise SettingError(f"{name}={written(value)} is no option: choose one of {', '.join(_options(name))}")
        if name in FOLDERS and (value is None or not str(value).strip()):
            raise SettingError(f"{name}={value} is empty (a shell variable that is not set?): give a folder")
        if name == "train" and not isinstance(value, dict):
            group_of(name, value)


def _options(group: str) -> list[str]:
    folder = RECIPES if group == "recipe" else CONF / group
    return sorted(file.stem for file in folder.glob("*.yaml"))


def check_secrets(arguments: list[str]) -> None:
    """Refuse secrets where Hydra itself would write them: in the folders and files of a sweep, and in `.hydra`.

    Raises:
        SettingError: the command line or a recipe holds one, and not only the name of an environment variable.
    """
    if not (_may_sweep(arguments) or any(word in each for word in WRITES for each in arguments)):
        return
    from omegaconf import OmegaConf

    given = [each.key_or_group for each in _parsed(arguments)]
    found = [name for name in given if any(secrets_in("value", name))]
    found += [name for each in _parsed(arguments) for name in secrets_in(_values(each), each.key_or_group)]
    composed = OmegaConf.to_container(compose_settings(arguments, hydra=True), resolve=False)
    assert isinstance(composed, dict)
    found += secrets_in(composed.pop("hydra")["sweeper"].get("params"), "hydra.sweeper.params")
    found += secrets_in(composed)
    if found:
        raise SettingError(
            f"{found[0]} is named like a secret, which Hydra would write into names of folders or files of its own "
            f"(--multirun, hydra.output_subdir): write {found[0].rpartition('.')[2]}: ${{oc.env:NAME}} into a recipe "
            "and set that variable, or start the runs one by one without them"
        )


def check_search(arguments: list[str]) -> None:
    """Look at what a search would be for, before its first run.

    Raises:
        SettingError: its sweeper needs a number of each run, and no `optimize` names one.
    """
    if not _may_sweep(arguments):
        return
    composed = compose_settings(arguments, hydra=True)
    sweeper = str(composed.hydra.sweeper.get("_target_"))
    if sweeper != BASIC_SWEEPER and composed.get("optimize") is None:
        raise SettingError(
            f"optimize=null, but the sweeper {sweeper.rpartition('.')[2]} chooses by a number of each run: set "
            "optimize=perplexity, or another number of the results"
        )


def name_folders_of_sweeps(arguments: list[str]) -> None:
    """Let Hydra name the folders of a sweep's jobs by what is swept: the value of `${sweep_folder:}`.

    Args:
        arguments: of the command line, which say what is the same in all jobs.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    def folder() -> str:
        if not HydraConfig.initialized():  # the configuration is only shown
            return "NAME=VALUE"
        job = HydraConfig.get()
        swept = swept_overrides(job.overrides.task, fixed_overrides(arguments, job))
        return SweepIndex(Path(job.sweep.dir)).folder_of(swept, numbered=job.sweeper._target_ != BASIC_SWEEPER)

    OmegaConf.register_new_resolver("sweep_folder", folder, replace=True)


def fixed_overrides(arguments: list[str], job: Any) -> set[str]:
    """The names of the overrides that are the same in all jobs of a sweep, as Hydra writes them: `+recipe`.

    Args:
        job: Hydra's own configuration, with the overrides of its sweeper besides those of the command line.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    sweeper = OmegaConf.to_container(job.sweeper)
    assert isinstance(sweeper, dict)
    params = [f"{name}={value}" for name, value in (sweeper.get("params") or {}).items()]
    is_swept = {
        each.get_key_element(): each.is_sweep_override()
        for each in [*OverridesParser.create().parse_overrides(params), *_parsed(arguments)]
    }  # of a name that comes twice the last one holds
    return {name for name, swept in is_swept.items() if not swept}


def _may_sweep(arguments: list[str]) -> bool:
    """Whether the command line, or a recipe that it names, makes this a sweep.

    The composition says so. It takes a moment, and a run of the packaged recipes that set no mode goes without it.
    """
    flags = _flags(arguments)
    if flags.multirun:
        return True
    words = [*SETS_MODE, *(file.stem for file in RECIPES.glob("*.yaml") if SWEEP in file.read_text("utf-8"))]
    if flags.config_dir is None and not any(word in each for word in words for each in arguments):
        return False
    return SWEEP in str(compose_settings(arguments, hydra=True).hydra.get("mode"))


def _flags(arguments: list[str]) -> Any:
    """Hydra's own options, as it reads them itself, and `overrides`."""
    from hydra._internal.utils import get_args_parser

    flags, others = get_args_parser().parse_known_args(arguments)
    flags.overrides = [*flags.overrides, *(each for each in others if not each.startswith("-"))]
    return flags


def _parsed(arguments: list[str], strict: bool = False) -> list[Any]:
    """The overrides among the arguments; those that are none are left for Hydra to refuse, unless `strict`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    found, parser = [], OverridesParser.create()
    for argument in _flags(arguments).overrides:
        try:
            found.append(parser.parse_override(argument))
        except HydraException:
            name, _, value = argument.partition("=")
            masked({name.lstrip("+~"): value})  # Hydra will show the line
            if strict:
                raise
    return found


def _values(override: Any) -> Any:
    """The value, or all of a sweep; null where those are names of files or numbers between limits."""
    from hydra.errors import HydraException

    try:
        return list(override.sweep_iterator()) if override.is_sweep_override() else override.value()
    except HydraException:
        return None


def compose_settings(arguments: list[str], hydra: bool = False) -> Any:
    """The configuration that these arguments make; of a sweep what its jobs have in common.

    Args:
        hydra: with Hydra's own part.
    """
    from hydra import compose, initialize_config_dir

    flags, path, overrides = _flags(arguments), [], []
    for override in _parsed(arguments):
        if override.key_or_group == "hydra.searchpath":
            path += override.value()
        elif not override.is_sweep_override():
            overrides.append(override.input_line)
    if flags.config_dir is not None:
        path.insert(0, f"file://{Path(flags.config_dir).absolute()}")
    listed = ",".join("'{}'".format(each.replace("'", "\\'")) for each in path)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [*overrides, f"hydra.searchpath=[{listed}]"], return_hydra_config=hydra)
