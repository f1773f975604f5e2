"""``python -IS client.py PLACE SECONDS|cold -- COMMAND …``: started in place of COMMAND, as one rank; a standby's child works.

It hands over all that a process has from its parent, then passes signals on and exits as the child exits. Where there is no
standby, or it refuses, COMMAND is started here, cold: some 20 ms have been lost. Between the two lies one byte: a child does
nothing of COMMAND before this process has told it to go, and this process starts nothing after it has. A standby that is still
importing is waited for, SECONDS at most: it is ahead of us, and ranks that import beside it would slow each other down.
``cold``: COMMAND is started here in any case, once the standby has made sure that nothing of an older attempt lives.

Imports are counted here: this start is paid at each restart, by each rank. Nothing of ftsupervise, nothing pure Python
beyond ``os``.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import fcntl
import marshal
import os
import resource
import select
import stat
import sys
import time

TYPE_CHECKING = False  # typing alone takes longer than all the rest
if TYPE_CHECKING:
    from typing import NoReturn

PROTOCOL = b"ftsupervise warm start 2\n"
COLD = "cold"
FDS_AT_ONCE = 200  # SCM_MAX_FD is 253
_APPEAR = 2.0  # seconds for a standby that was just started to say that it is coming
_AGAIN = 0.02  # seconds between two checks for it
_CONNECT = 2.0  # seconds for a standby to take the connection
_HEARD = (
    8.0  # seconds for it to say that we fit, or, once nothing of an older attempt lives, that we do not (standby.py)
)
_ANSWER = 20.0  # seconds from there to the child's readiness: processes of an older attempt die first (standby.py)
_DIE = 5.0  # seconds a child gets to be gone after SIGKILL
_NAMESPACES = ("mnt", "pid", "net", "ipc", "user", "uts", "cgroup")
_RIGHTS = ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Mems_allowed_list")  # of /proc/self/status
_DEVICES = ("/dev", "/dev/dri", "/dev/infiniband", "/dev/nvidia-caps")
_OWN = ("tty", "std", "fd")  # a process' own: its terminal, its descriptors
_UNCATCHABLE = (_signal.SIGKILL, _signal.SIGSTOP, _signal.SIGCHLD)


class StandbyRefused(Exception):
    """The standby refused this rank; the text says why."""


def main() -> NoReturn:
    place, cold, command = sys.argv[1], sys.argv[2] == COLD, sys.argv[4:]
    try:
        link, child = hand_over(place, 0.0 if cold else float(sys.argv[2]), command, cold)
    except (OSError, StandbyRefused, ValueError) as problem:
        start_cold(command, str(problem) or type(problem).__name__)
    follow(link, child)


def hand_over(place: str, patience: float, command: list[str], cold: bool = False) -> tuple[_socket.socket, int]:
    """Return the connection to the standby and a pidfd of the child, which waits for ``go``. Raises StandbyRefused, OSError."""
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    link = connect(place, node, patience)
    if peer(link)[1] != os.geteuid():
        raise StandbyRefused("the standby belongs to another user")
    fds = inherited(but=link.fileno())
    here = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    payload = marshal.dumps({**myself(command, fds), COLD: cold})
    link.settimeout(_HEARD)
    link.sendall(PROTOCOL + len(payload).to_bytes(8, "little") + payload)
    _expect(link.recv(4096), b"send")  # what lies unread in the queue of a standby that hangs would stay open there
    link.settimeout(_ANSWER)
    every = [here, *fds]
    for begin in range(0, len(every), FDS_AT_ONCE):
        some = b"".join(fd.to_bytes(4, sys.byteorder) for fd in every[begin : begin + FDS_AT_ONCE])
        link.sendmsg([b"F"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, some)])
    os.close(here)
    answer, ancillary, _, _ = link.recvmsg(4096, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
    _expect(answer, b"ready")
    return link, int.from_bytes(ancillary[0][2][:4], sys.byteorder)


def connect(place: str, node: str, patience: float) -> _socket.socket:
    """Connect to PLACE/NODE.sock, and wait for it as long as a standby is on its way. Raises StandbyRefused, OSError."""
    began = time.monotonic()
    name = f"{place}/{node}"
    while True:
        check(place)
        comes = patience > 0 and is_coming(f"{name}.coming", time.monotonic() - began)  # asked before the socket is
        link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        link.settimeout(_CONNECT)
        try:
            link.connect(f"{name}.sock")
            return link
        except OSError as error:
            link.close()
            if not comes:
                raise StandbyRefused(f"no standby here ({error.strerror or 'no answer'})") from None
        if time.monotonic() - began >= patience:
            raise StandbyRefused("the standby was still importing")
        time.sleep(_AGAIN)


def check(place: str) -> None:
    """Check that no other account can write there; it need not exist yet. Raises StandbyRefused."""
    try:
        found = os.lstat(place)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise StandbyRefused(f"{place} belongs to another user")


def is_coming(path: str, waited: float) -> bool:
    """Return whether a standby holds its lock. Where there is no file yet, its own start may not have come so far."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return waited < _APPEAR
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _expect(answer: bytes, word: bytes) -> None:
    if not answer.startswith(word):
        said, line, _ = answer.partition(b"\n")
        raise StandbyRefused(said.decode("utf-8", "replace") if line else "the standby could not become this rank")


def peer(link: _socket.socket) -> tuple[int, int, int]:
    """Return process, user and group at the other end."""
    raw = link.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    pid, uid, gid = (int.from_bytes(raw[at : at + 4], sys.byteorder, signed=True) for at in (0, 4, 8))
    return pid, uid, gid


def myself(command: list[str], fds: list[int]) -> dict[str, object]:
    """Return the state that COMMAND would inherit from us over an exec."""
    limits = {}
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            number = getattr(resource, name)
            limits[number] = resource.getrlimit(number)
    umask = os.umask(0o77)
    os.umask(umask)
    return {
        "command": [os.fsencode(word) for word in command],
        "python": sys.hexversion,
        "executable": os.fsencode(sys.executable or ""),
        "env": dict(os.environb),
        "fds": fds,
        "limits": limits,
        "umask": umask,
        "cpus": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "groups": sorted(os.getgroups()),
        "blocked": sorted(int(number) for number in _signal.pthread_sigmask(_signal.SIG_BLOCK, [])),
        "ignored": [int(n) for n in range(1, _signal.NSIG) if _ignored(n)],
        "held": held_to(),
        "devices": devices(),
        "oom": _read("/proc/self/oom_score_adj"),
    }


def held_to() -> dict[str, str]:
    """Return the limits of a process that a fork cannot change: namespaces, rights, the NUMA nodes of its memory."""
    found = {name: _link(f"/proc/self/ns/{name}") for name in _NAMESPACES}
    status = dict(line.split(":\t", 1) for line in _read("/proc/self/status", 1 << 14).splitlines() if ":\t" in line)
    found |= {name: status.get(name, "") for name in _RIGHTS}
    found["memory policy"] = " ".join(
        _read("/proc/self/numa_maps", 256).split()[1:2]
    )  # of the first area: the task's own
    found["personality"] = _read("/proc/self/personality")
    found["scheduling policy"] = str(os.sched_getscheduler(0))
    return found


def devices() -> list[str]:
    """Return the devices that may be opened here, GPUs among them.

    Slurm gives a task its own through the device cgroup, which ``access`` asks and no file shows. Nothing is opened:
    that would wake a GPU.
    """
    return [path for folder in _DEVICES for path in _inside(folder) if os.access(path, os.R_OK | os.W_OK)]


def _inside(folder: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [f"{folder}/{name}" for name in sorted(names) if not name.startswith(_OWN)]


def inherited(but: int) -> list[int]:
    """Return the open descriptors that COMMAND would inherit, in order."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) != but and os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # the one that listed the folder
            continue
    return sorted(found)


def start_cold(command: list[str], why: str) -> NoReturn:
    """Run COMMAND itself in this process, as if we had not been here."""
    if os.environ.get("SLURM_PROCID", "0") == "0":
        _say(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} ftsupervise: started cold: {why}\n")
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them, and that would be inherited
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, os.environ)
    except OSError as error:
        _say(f"{command[0]}: {error.strerror}\n")
        os._exit(127 if error.errno == 2 else 126)


def follow(link: _socket.socket, child: int) -> NoReturn:
    """Let the child start; pass signals on; exit as it exits."""
    signals, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    keep = {link.fileno(), child, signals, wakeup}
    _signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in _signal.valid_signals():
        if number not in _UNCATCHABLE:
            try:
                _signal.signal(number, lambda *_: None)
            except (OSError, ValueError):
                continue
    try:
        link.sendall(b"go")
    except OSError:  # it died between its message and ours; COMMAND has probably not run, but that is not certain
        _leave_by(_signal.SIGKILL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
    for name in os.listdir("/proc/self/fd"):  # a reader of our output waits for the child's end of it only
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:
                continue
    link.settimeout(None)
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    poll.register(signals, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if signals in ready:
            _pass_on(os.read(signals, 4096), child)
        if link.fileno() in ready:
            break
    try:
        word = link.recv(4)
    except OSError:
        word = b""
    if len(word) < 4:  # the standby is gone: its children die with it
        _end(child)
        _leave_by(_signal.SIGKILL)
    status = int.from_bytes(word, "little")
    if os.WIFSIGNALED(status):
        _leave_by(os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _pass_on(numbers: bytes, child: int) -> None:
    for number in numbers:
        try:
            _signal.pidfd_send_signal(child, number)
        except (OSError, ValueError):  # it has just ended
            continue


def _end(child: int) -> None:
    try:
        _signal.pidfd_send_signal(child, _signal.SIGKILL)
    except OSError:
        return
    gone = select.poll()
    gone.register(child, select.POLLIN)
    gone.poll(_DIE * 1000)


def _leave_by(number: int) -> NoReturn:
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )  # the core is the child's
    if number not in _UNCATCHABLE:
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # a signal that ends no process


def _ignored(number: int) -> bool:
    try:
        return bool(_signal.getsignal(number) == _signal.SIG_IGN)
    except ValueError:
        return False


def _say(text: str) -> None:
    try:
        os.write(2, text.encode("utf-8", "replace"))
    except OSError:
        return


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str, most: int = 64) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, most).decode("utf-8", "replace").strip()
        finally:
            os.close(fd)
    except OSError:
        return ""


if __name__ == "__main__":
    main()
