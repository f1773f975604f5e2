"""A server on loopback that speaks S3 and keeps its objects in memory."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

BUCKET = "checkpoints"


class S3(NamedTuple):
    endpoint: str
    url: str  # of the bucket


@contextmanager
def s3_server() -> Iterator[S3]:
    """A running server with one empty bucket; the environment leads S3 clients of this process and its children to it."""
    import boto3
    import fsspec.config
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    ours = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "ada",
        "AWS_SECRET_ACCESS_KEY": "lovelace",
        "AWS_DEFAULT_REGION": "us-east-1",
        "FSSPEC_S3": json.dumps({"skip_instance_cache": True}),
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    fsspec.config.set_conf_env(fsspec.config.conf)
    try:
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield S3(endpoint, f"s3://{BUCKET}/run-1")
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        fsspec.config.conf.pop("s3", None)
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
