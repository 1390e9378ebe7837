"""A real S3 server over HTTP (moto's), in this process, for tests and benchmarks of storage."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

ACCESS = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}


def forget_servers() -> None:
    """File systems are kept, and know the server of an earlier test."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


@contextmanager
def serving(bucket: str = "bucket") -> Iterator[str]:
    """The URL of an empty bucket; the environment leads this process and those that it starts to its server."""
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = {name: os.environ.get(name) for name in (*ACCESS, "AWS_ENDPOINT_URL")}
    os.environ.update(ACCESS, AWS_ENDPOINT_URL=f"http://{host}:{port}")
    forget_servers()
    try:
        fsspec.filesystem("s3").mkdir(bucket)
        yield f"s3://{bucket}"
    finally:
        forget_servers()
        server.stop()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
