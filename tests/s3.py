"""An S3-compatible server on the loopback interface, which tests start; ranks find it by the
environment.
"""

import logging
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from ..sharding.storage.drivers import forget_drivers
from .ranks import preload

preload("s3fs")

BUCKET = "bucket"


@dataclass(frozen=True)
class Server:
    """`environment`: what processes need to find it."""

    environment: dict[str, str]

    @property
    def files(self):
        """fsspec's file system for it, to look at what is there by another way than ours."""
        import fsspec

        return fsspec.filesystem("s3", use_listings_cache=False)

    def names(self, place: str) -> list[str]:
        """All objects below `place`, without it."""
        found = self.files.find(f"{BUCKET}/{place}")
        return sorted(name.removeprefix(f"{BUCKET}/{place}/") for name in found)

    @contextmanager
    def refusing_everybody(self) -> Iterator[None]:
        """Meanwhile it knows no one's credentials."""
        self._tell("reset-auth", b"0")
        try:
            yield
        finally:
            self._tell("reset-auth", b"inf")

    def forget_all(self) -> None:
        """What servers of this process were told before: moto keeps one store."""
        self._tell("reset", b"")

    def _tell(self, what: str, content: bytes) -> None:
        url = f"{self.environment['AWS_ENDPOINT_URL']}/moto-api/{what}"
        headers = {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(url, content, headers)
        urllib.request.urlopen(request, timeout=10).close()


@contextmanager
def serving() -> Iterator[Server]:
    """A server with a bucket of the name `BUCKET`, and this process's environment set to it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    started = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        with mock.patch.dict(os.environ, environment):
            server = Server(environment)
            server.forget_all()
            type(server.files).clear_instance_cache()  # those of another server
            forget_drivers()
            server.files.call_s3("create_bucket", Bucket=BUCKET)
            yield server
    finally:
        started.stop()
