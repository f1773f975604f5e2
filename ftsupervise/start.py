"""``python -I start.py WORD …``: the program, with nothing on the module path that the current directory could change.

``python -m ftsupervise`` looks for modules in the current directory first, and so does PYTHONPATH with an empty or relative
entry: a ``click.py`` that somebody else laid there would run as the person who typed the command. ``-I`` leaves all of that
out. What this package may need besides (it may be installed by PYTHONPATH or ``pip install --user``) is looked at last.

    start.py WORD …             as ``ftsupervise WORD …``
    start.py -m MODULE WORD …   another program of this package
"""

from __future__ import annotations

import os
import sys


def prepare() -> None:
    """Complete the module path by this package's own folder, the absolute entries of PYTHONPATH and the account's site,
    unless PYTHONUSERBASE is relative: then that is in the current directory."""
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(here)
    outer = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for folder in (root, *filter(os.path.isabs, outer)):
        if folder not in sys.path:
            sys.path.append(folder)
    if sys.prefix == sys.base_prefix and "PYTHONNOUSERSITE" not in os.environ:
        import site

        account = site.getusersitepackages()
        if os.path.isabs(account) and account not in sys.path and os.path.isdir(account):
            site.addsitedir(account)
    import ftsupervise

    if os.path.dirname(os.path.abspath(ftsupervise.__file__)) != here:  # another version is installed besides
        del sys.modules["ftsupervise"]
        sys.path.insert(0, root)


def leave_out_the_current_directory() -> None:
    """For a start that somebody typed, as ``python -m ftsupervise`` or with an empty or relative entry in PYTHONPATH: from here
    on nothing is imported from there, unless this package lies there or PYTHONPATH names it in full."""
    try:
        here = os.getcwd()
    except OSError:  # it is gone, and nothing lies there
        here = ""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    outer = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    relative = {os.path.abspath(entry) for entry in outer if not os.path.isabs(entry)} if here else set()
    kept = {root, *(os.path.normpath(entry) for entry in outer if os.path.isabs(entry))}
    gone = ({here, *relative} - kept) | ({""} if here != root else set())
    sys.path[:] = [entry for entry in sys.path if entry not in gone]


def step_behind() -> None:
    """Go on as the child of a process that uses no disk, where this is a supervisor: before there is much in its memory."""
    if sys.argv[1:2] == ["run"]:
        from ftsupervise.host.front import stand_before

        stand_before()


def main() -> None:
    script = os.environ.pop("FTSUPERVISE_SCRIPT", "") if sys.argv[1:2] == ["run"] else ""  # a job script started it
    try:
        prepare()
        step_behind()
        if sys.argv[1:2] == ["-m"]:
            from runpy import run_module

            module = sys.argv[2]
            del sys.argv[1:3]
            run_module(module, run_name="__main__", alter_sys=True)
            return
        import gc

        gc.disable()  # until a command runs: nothing that a start makes is garbage
        from ftsupervise.cli import main as program

        if script:
            import ftsupervise.run.supervisor  # noqa: F401
            from ftsupervise.cli.run import run

            run.make_context("run", sys.argv[2:])  # another version may be installed by now, with other options
            os.environ.pop("FTSUPERVISE_TRIED", None)
    except Exception as error:
        if script:
            _back_to_the_script(script, f"{type(error).__name__}: {error}")
        raise
    program()


def _back_to_the_script(script: str, why: str) -> None:
    """Give its place back to the job script, which knows what to do where nothing can be started: no package is there, or they
    are of another version than at launch."""
    os.execv("/bin/bash", ["bash", script, "ftsupervise-unfit", " ".join(why.split())[:300], *sys.orig_argv])


if __name__ == "__main__":
    main()
