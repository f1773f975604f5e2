"""``python -IS start.py ORDERS -- COMMAND …``: COMMAND's interpreter as a standby, once it is sure that it stops at the hook.

A Python that does not read PYTHONPATH, or has no ``site``, would run the user's program here. So it is asked first, with the
same flags and the same environment and nothing to run.
"""

from __future__ import annotations

import json
import os
import sys

SEEN = 42  # what sitecustomize.py leaves with
_HOOK = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    orders, flags, command = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]
    before = os.environ.get("PYTHONPATH")
    orders["pythonpath"] = before
    os.environ["PYTHONPATH"] = _HOOK if before is None else f"{_HOOK}{os.pathsep}{before}"
    os.environ["FTSUPERVISE_STANDBY"] = "probe"
    asked = [*command[: 1 + flags], "-c", "raise SystemExit(3)"]
    pid = os.fork()
    if pid == 0:
        try:
            os.execvp(asked[0], asked)
        finally:
            os._exit(127)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != SEEN:
        node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        os.write(
            1, (json.dumps({"node": node, "no": f"its Python does not stop at our hook ({code})"}) + "\n").encode()
        )
        return
    os.environ["FTSUPERVISE_STANDBY"] = json.dumps(orders)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
