"""One host of `prepare.py`: prepares books with a packing that was pickled for it, and prints when its work began."""

import pickle
import sys
import time
from pathlib import Path

from distill.config.settings import DataConfig, SourceConfig
from distill.data.build_tokens import build
from distill.data.shards.destination import LocalFolder
from distill.data.sources import find_source


def main(data: str, packing: str, place: str, scratch: str, workers: str, shard_bytes: str) -> None:
    made = pickle.loads(Path(packing).read_bytes())
    print(time.time(), flush=True)
    cache = DataConfig(workers=int(workers), shard_bytes=int(shard_bytes))
    source = find_source(SourceConfig(kind="gutenberg", path=data), "corpus", cache)
    assert source is not None
    build(LocalFolder(place), "books", [source], made, cache, Path(scratch))


if __name__ == "__main__":
    main(*sys.argv[1:])
