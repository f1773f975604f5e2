"""torch and torchft, of the version that all of our integration was tried with: it uses what torchft keeps to itself."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ftsupervise.errors import ConfigError
from ftsupervise.integrations.needed import needed

VERSION = "0.2."  # what all this was tried with


def _torchft() -> Any:
    """The package. Raises ImportError where it is missing, and ConfigError where it is another version."""
    package = needed("torchft", package="torchft==0.2.*")
    try:
        version("torchft-nightly")
        raise ConfigError(
            "torchft-nightly is installed, and speaks another protocol than torchft 0.2: "
            "pip uninstall torchft-nightly torchft, then pip install 'ftsupervise[torchft]'"
        )
    except PackageNotFoundError:
        pass
    found = version("torchft")
    if not found.startswith(VERSION):
        raise ConfigError(
            f"torchft {found} is installed, and ftsupervise works with version 0.2 of it: pip install 'torchft==0.2.*'"
        )
    inside = ("_async_quorum", "allreduce", "report_error", "should_commit", "start_quorum", "wait_quorum")
    if lost := [name for name in inside if not callable(getattr(package.Manager, name, None))]:
        raise ConfigError(f"torchft {found} has no Manager.{lost[0]}: pip install 'torchft==0.2.0'")
    return package


torchft = _torchft()
torch = needed("torch", package="torch")
