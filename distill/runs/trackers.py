"""Where the numbers of a run go while it runs: metrics.jsonl always, wandb or TensorBoard on request."""

import json
import logging
import uuid
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from distill.config.settings import TrackerConfig
from distill.distributed import Ranks
from distill.runtime.errors import SettingError, first_line
from distill.runtime.files import remove
from distill.runtime.jsonl import LogLine

logger = logging.getLogger(__name__)


class Tracker:
    """Where numbers go besides metrics.jsonl; without a client nowhere.

    A run can do without it: where it fails, that is logged once, and nothing is sent from then on.
    """

    def __init__(self, kind: str = "none", make: "Callable[[], Wandb | TensorBoard] | None" = None) -> None:
        self.kind, self._client = kind, None
        self._client = self._try(make) if make else None

    def log_metrics(self, metrics: LogLine, step: int) -> None:
        """Send what is a number."""
        numbers = {key: value for key, value in metrics.items() if key != "step" and isinstance(value, int | float)}
        if (client := self._client) is not None:
            self._try(lambda: client.log(numbers, step))

    def close(self, failed: bool = False) -> None:
        """`failed`: whether an error has ended the run. A second call does nothing."""
        client, self._client = self._client, None
        if client is not None:
            self._try(lambda: client.close(failed))

    def _try(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except SettingError:
            raise
        except Exception as error:
            self._client = None
            logger.warning(
                f"tracker.kind={self.kind} has failed ({type(error).__name__}: {first_line(error)}); the run continues "
                "without it, and its numbers are in metrics.jsonl"
            )
            return None


def check(settings: TrackerConfig) -> None:
    """Raises SettingError for a package that is not installed, and for wandb online without a key; writes nothing."""
    kind = settings.kind
    if kind == "none":
        return
    try:
        package = import_module({"wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}[kind])
    except ImportError:
        what, cure = "the package is not installed", f"run `pip install {kind}`"
        raise SettingError(what, setting="tracker.kind", value=kind, cure=cure) from None
    if kind == "wandb" and settings.mode == "online":
        problem = "no wandb key on this machine"
        try:
            has_key = package.login(prompt=False)
        except package.errors.Error as error:
            has_key, problem = False, f"wandb takes no login ({_one_line(error)})"
        if not has_key:
            cure = "run `wandb login`, or use offline"
            raise SettingError(problem, setting="tracker.mode", value="online", cure=cure)


def build(settings: TrackerConfig, folder: Path, config: dict[str, Any], name: str) -> Tracker:
    """The tracker that `settings.kind` names, after `check`; its files are in `folder`.

    `config` is the resolved configuration and `name` the run's name, both for display. Raises SettingError where wandb
    does not start, with nothing of it in `folder`.
    """
    if settings.kind == "wandb":
        return Tracker(settings.kind, lambda: Wandb(settings, folder, config, name))
    return Tracker(settings.kind, None if settings.kind == "none" else lambda: TensorBoard(folder, config))


def open_on_rank_0(settings: TrackerConfig, folder: Path, config: dict[str, Any], ranks: Ranks) -> Tracker:
    """`build` on rank 0, whose SettingError all ranks raise; the other ranks track nothing."""
    made: list[Tracker] = []
    ranks.decide(lambda: made.append(build(settings, folder, config, folder.name)))
    return made[0] if made else Tracker()


class Wandb:
    """Weights & Biases; offline unless set otherwise, under `folder`/wandb. Never asks for a login.

    The run's id is kept in `folder`/wandb/id, so that a resumed run continues in the same chart. Offline, each process
    leaves one `offline-run-*` folder with that id; `wandb sync --append folder/wandb/offline-run-*` joins them.
    """

    def __init__(self, settings: TrackerConfig, folder: Path, config: dict[str, Any], name: str) -> None:
        import wandb

        online = settings.mode == "online"
        identity = folder / "wandb" / "id"
        resumed, before = identity.exists(), {*identity.parent.glob("*")}
        if not resumed:
            identity.parent.mkdir(parents=True, exist_ok=True)
            identity.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
        try:
            self.run = wandb.init(
                project=settings.project,
                name=settings.name or name,
                tags=settings.tags or None,
                id=identity.read_text(encoding="utf-8").strip(),
                dir=folder,
                mode="online" if online else "offline",
                resume="allow" if online and resumed else None,  # offline, wandb warns and ignores it
                reinit="create_new",  # a run of the program's own goes on beside this one
                config=config,
                # Of the machine and the command line, which may hold secrets, wandb writes nothing down.
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, disable_code=True, x_disable_meta=True
                ),
            )
        except wandb.errors.Error as error:
            for path in {*identity.parent.glob("*")} - before if before else {identity.parent}:
                remove(path)
            problem = f"wandb does not start ({_one_line(error)})"
            raise SettingError(problem, setting="tracker.kind", value="wandb", cure="set tracker=none") from None
        if not online:
            logger.info(
                f"wandb runs offline: tracker.mode=online would send the metrics during training; to send them later, "
                f"run `wandb sync --append {folder}/wandb/offline-run-*`"
            )
        # Steps travel as a metric of their own: wandb's own counter refuses to go back to the checkpoint on resume.
        self.run.define_metric("*", step_metric="step")

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.run.log({**numbers, "step": step})

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class TensorBoard:
    """Event files under `folder`/tensorboard."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder, self.config = folder / "tensorboard", config
        self.writer: Any = None

    def log(self, numbers: dict[str, float], step: int) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Only the first line shows where a run resumes; what the killed one wrote after that is hidden.
            self.writer = SummaryWriter(str(self.folder), purge_step=step)
            text = json.dumps(self.config, indent=2, default=str)
            self.writer.add_text("config", "    " + text.replace("\n", "\n    "), step)
        for key, value in numbers.items():
            self.writer.add_scalar(key, value, step)

    def close(self, failed: bool) -> None:
        if self.writer is not None:
            self.writer.close()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
