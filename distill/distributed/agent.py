"""The ranks of one host in an elastic run: a process that its launcher speaks to through its standard input.

A line is the number of a signal, for the ranks to heed. The end of the input means that the launcher, or the connection
to it, is gone: then the ranks are stopped, and what is left of them is killed.
"""

import json
import os
import signal
import sys
import threading
import time

from torch.distributed import DistNetworkError

from distill.distributed.ranks import LAST_END, run_ranks
from distill.runtime.errors import RankLost, first_line
from distill.runtime.progress import say


def obey() -> None:
    """Act on what stands in the standard input, to its end."""
    for line in sys.stdin:
        os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_END)
    os.kill(os.getpid(), signal.SIGKILL)  # and with this process its ranks


def main() -> int:
    """Run the ranks; gives the status of a loss where the port to meet at is taken: another may be free."""
    first, processes, total, address, port, command = sys.argv[1:]
    threading.Thread(target=obey, name="launcher", daemon=True).start()
    try:
        return run_ranks(int(first), int(processes), int(total), address, int(port), json.loads(command))
    except DistNetworkError as error:
        say(sys.stderr, f"distill: the ranks cannot meet at port {port} of {address}: {first_line(error)}\n")
        return RankLost.status


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # torch takes seconds to go in the usual way, and the others wait to start again
