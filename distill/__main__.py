"""The command `python -m distill`: compose the configuration, run it, and turn errors into one line and a status."""

import os
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Exit status: 0 done, 2 bad input, 3 training diverged, 130 or 143 stopped by a signal; anything else is a bug."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from distill.config import CONF, build, explain, register
    from distill.errors import Diverged, Interrupted, SettingError

    show_traceback = os.environ.get("DISTILL_TRACEBACK") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to this function, which says them in one line

    ended: list[SettingError | Diverged | Interrupted] = []

    def composed(cfg: Any) -> None:
        try:
            config = build(cfg)
            job = HydraConfig.get()
            from distill.run import run

            run(
                config,
                path=Path(job.runtime.output_dir),
                recipe=job.runtime.choices.get("recipe") or "default",
                command=" ".join(["python -m distill", *job.overrides.task]),
                resolved=OmegaConf.to_yaml(cfg, resolve=True),
            )
        except (SettingError, Diverged, Interrupted) as error:
            if show_traceback:
                raise
            # Kept back from Hydra, which would print lines of its own; the other jobs of a sweep go on.
            print(f"distill: {error}", file=sys.stderr)
            ended.append(error)

    register()
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(composed)()
    except KeyboardInterrupt:
        print("distill: interrupted before or after training; the same command goes on", file=sys.stderr)
        return 130
    except (HydraException, OmegaConfBaseException) as error:
        if show_traceback:
            raise
        print(f"distill: {explain(error)}", file=sys.stderr)
        return SettingError.status
    return ended[0].status if ended else 0


if __name__ == "__main__":
    sys.exit(main())
