"""What a run is made of once its folder is open."""

from dataclasses import dataclass

from distill.config.settings import Config
from distill.distributed import Ranks
from distill.objective.objective import Objective
from distill.runs.pair import Pair
from distill.runs.run_folder import RunFolder
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
