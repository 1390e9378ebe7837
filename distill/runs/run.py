"""What a run is made of once its folder is open, and who follows its training."""

from dataclasses import dataclass

from distill.config.settings import Config
from distill.distributed import Ranks
from distill.objective.objective import Objective
from distill.runs.curve import Curve
from distill.runs.history import StudentHistory
from distill.runs.metrics import Metrics, RunLog
from distill.runs.observers import UserObservers
from distill.runs.pair import Pair
from distill.runs.run_folder import RunFolder
from distill.runs.snapshots import Snapshots
from distill.runs.step import Follower
from distill.tasks import Prepared, Task


@dataclass(frozen=True)
class Run:
    """A run that is about to train; no setting of it is open any more."""

    config: Config
    task: Task
    pair: Pair
    data: Prepared
    objective: Objective
    folder: RunFolder
    ranks: Ranks


@dataclass(frozen=True)
class Followers:
    """Who follows a training from step to step, and the history of its student."""

    log: RunLog
    metrics: Metrics
    curve: Curve
    snapshots: Snapshots
    observers: UserObservers
    history: StudentHistory

    @property
    def in_order(self) -> tuple[Follower, ...]:
        """In the order in which the loop calls them."""
        return self.metrics, self.curve, self.snapshots, self.observers
