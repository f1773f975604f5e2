"""What ``import ftsupervise`` runs first in a training that was given our guard by PYTHONPATH: it decides whose guard is taken.

``RUN/guard/VERSION-…/path/ftsupervise/__init__.py`` is a copy of this file. It stands alone because entries of PYTHONPATH come
before all that is installed: what lies beside it would be taken in any case. An ftsupervise that is installed in the training's
Python is taken if it has the supervisor's version; else, or where there is none, the guard in ``package`` is taken. This file
moves its own entry of ``sys.path`` out of the way and imports anew. It begins in any Python 3, to say what is too old.
"""

import os
import sys


def _take() -> None:
    entry = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    whole = os.path.dirname(entry)
    package, version = os.path.join(whole, "package"), os.path.basename(whole).rpartition("-")[0]
    here = sys.modules.pop("ftsupervise")
    others = [one for one in sys.path if os.path.abspath(one) != entry]
    at = min([n for n, one in enumerate(sys.path) if os.path.abspath(one) == entry] or [len(others)])
    before = list(sys.path)
    sys.path[:] = others
    found = _installed()
    if found is None and sys.version_info < (3, 9):
        sys.path[:] = before
        sys.modules["ftsupervise"] = here
        raise ImportError(
            "the guard of ftsupervise needs Python 3.9 or newer, and {} is {}.{}".format(
                sys.executable, *sys.version_info[:2]
            )
        )
    if found == version:
        sys.path.append(package)  # processes that are started with this path find one too
        return
    _forget()
    sys.path.insert(len(others) if found is None else min(at, len(others)), package)
    if found is not None and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        words = "ftsupervise: {} has ftsupervise {} and this run's supervisor is {}, whose guard is used\n"
        sys.stderr.write(words.format(sys.executable, found, version))
    import ftsupervise  # noqa: F401 - in the place of this file


def _installed() -> "str | None":
    """Import what else is there; return its version, None where there is nothing that can be imported."""
    try:
        import ftsupervise
    except Exception:  # whatever it raises: it is of no use here
        _forget()
        return None
    if getattr(ftsupervise, "__file__", None) is None:  # a folder of that name, as of a run or a clone
        return None
    return str(getattr(ftsupervise, "__version__", "unknown"))


def _forget() -> None:
    """Drop all that was imported of another ftsupervise: its parts must not be mixed with ours."""
    for name in [one for one in sys.modules if one.partition(".")[0] == "ftsupervise"]:
        del sys.modules[name]


if __name__ == "ftsupervise":
    _take()
