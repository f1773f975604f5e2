"""Says all it can see of itself, as JSON, one line: run cold and warm, the two must be the same. No test by itself."""

import __main__
import asyncio
import faulthandler
import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import threading


def fds() -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            mode = os.fstat(int(name)).st_mode
        except OSError:
            continue
        found[name] = [stat.S_IFMT(mode), os.get_inheritable(int(name))]
    return found


def stream(file) -> dict[str, object]:  # type: ignore[no-untyped-def] # no import of typing: this counts what is loaded
    if file is None:
        return {}
    names = ("name", "mode", "encoding", "errors", "newlines", "line_buffering", "write_through", "closed")
    seen = {name: getattr(file, name) for name in names}
    return {
        **seen,
        "type": str(type(file.buffer)),
        "tty": file.isatty(),
        "seekable": file.seekable(),
        "fd": file.fileno(),
    }


def handlers() -> dict[str, str]:
    return {str(n): getattr(h := signal.getsignal(n), "__name__", str(h)) for n in signal.valid_signals()}


def status() -> dict[str, object]:
    lines = open("/proc/self/status").read().splitlines()
    wanted = ("Name", "Umask", "Uid", "Gid", "Groups", "Threads", "SigBlk", "SigIgn", "SigCgt", "CapEff", "NoNewPrivs",
              "Seccomp", "Cpus_allowed_list", "TracerPid")  # fmt: skip
    found = {
        line.partition(":")[0]: line.partition(":")[2].strip() for line in lines if line.partition(":")[0] in wanted
    }
    return {**found, "SigCgt": int(found["SigCgt"], 16) & ~(3 << 31)}  # the two glibc takes with the first thread


def double(n: int) -> int:
    return 2 * n


def children() -> dict[str, object]:
    found: dict[str, object] = {}
    for way in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(way).Pool(2) as pool:
            found[way] = pool.map(double, range(4))
    done = subprocess.run(["sh", "-c", "echo $WITNESS; ulimit -n; umask; trap"], capture_output=True, text=True)
    found["shell"] = [done.stdout, done.returncode]
    thread = threading.Thread(target=lambda: found.__setitem__("thread", threading.current_thread().name))
    thread.start()
    thread.join()
    found["async"] = asyncio.run(asyncio.sleep(0, "slept"))
    return found


def everything() -> dict[str, object]:
    main = {
        key: str(value)[:200] for key, value in vars(__main__).items() if key.startswith("__") and key != "__builtins__"
    }
    main["__spec__"] = re.sub(r"0x\w+", "", main["__spec__"])
    main["__loader__"] = str(type(vars(__main__).get("__loader__")))
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": str(sys.flags),
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "executable": [sys.executable, sys.prefix, sys.base_prefix],
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
        "environ in order": list(os.environ),
        "environ in /proc": sorted(open("/proc/self/environ", "rb").read().decode().split("\0")),
        "environ in C": subprocess.run(["env"], capture_output=True, text=True).stdout.count("\n"),
        "cmdline": open("/proc/self/cmdline", "rb").read().decode().split("\0"),
        "comm": open("/proc/self/comm").read(),
        "exe": os.readlink("/proc/self/exe"),
        "main": main,
        "fds": fds(),
        "streams": [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr), sys.stdout is sys.__stdout__],
        "handlers": handlers(),
        "blocked": sorted(int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "wakeup": signal.set_wakeup_fd(-1),
        "status": status(),
        "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
        "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "nice": os.nice(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "oom": open("/proc/self/oom_score_adj").read(),
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding()],
        "threads": [t.name for t in threading.enumerate()],
        "main thread": threading.current_thread() is threading.main_thread(),
        "native id": threading.get_native_id() == os.getpid(),
        "multiprocessing": [multiprocessing.current_process().name, multiprocessing.parent_process() is None,
                            multiprocessing.get_start_method(), multiprocessing.active_children()],
        "gc": [gc.isenabled(), gc.get_threshold()],
        "faulthandler": faulthandler.is_enabled(),
        "hooks": [sys.excepthook is sys.__excepthook__, str(sys.gettrace()), str(sys.getprofile()), len(sys.meta_path)],
        "recursion": sys.getrecursionlimit(),
        "sitecustomize": "sitecustomize" in sys.modules,
        "ours": sorted(n for n in sys.modules if n.startswith("ftsupervise")),
        "logging": [logging.root.level, len(logging.root.handlers)],
        "depth": depth(),
        "stdin": sys.stdin.read() if sys.stdin is not None and not sys.stdin.isatty() else None,
        "children": children(),
    }  # fmt: skip


def depth() -> int:
    frame, count = sys._getframe(), 0
    while frame.f_back is not None:
        frame, count = frame.f_back, count + 1
    return count


if __name__ == "__main__":
    print(json.dumps({**everything(), "random": [random.random(), os.getpid()]}))
