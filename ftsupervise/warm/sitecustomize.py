"""Found by ``site`` because ``ftsupervise run`` puts this folder first in PYTHONPATH of a standby, and of nothing else.

Kept to what every Python 3 can read. If anything goes wrong here the process ends: going on would run the user's program.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_ENV = "FTSUPERVISE_STANDBY"
SEEN = 42  # exit code: this file is found, with this interpreter, these flags and this environment


def _step_aside() -> None:
    """Remove this folder from the path, and run the site's own sitecustomize, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    sys.path_importer_cache.pop(_HERE, None)
    sys.modules.pop("sitecustomize", None)


def _stand_by(orders: str) -> None:
    try:
        if orders == "probe":
            os._exit(SEEN)
        above = os.path.dirname(os.path.dirname(_HERE))
        sys.path.insert(0, above)
        from ftsupervise.warm.standby import stand_by

        sys.path.remove(above)
        stand_by(orders)  # comes back in a child that is to become a rank, and nowhere else
        for name in [name for name in sys.modules if name == "ftsupervise" or name.startswith("ftsupervise.")]:
            del sys.modules[name]
    except BaseException:
        try:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)


_step_aside()
if os.environ.get(_ENV):
    _stand_by(os.environ[_ENV])
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401 - the site's own; where there is none, site takes the ImportError for just that
