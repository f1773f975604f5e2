"""The sentences by which failures are known: one table, from the messages of Python, PyTorch, NCCL, CUDA, the kernel and Slurm.

A sentence is either a cause, which says what broke first, or it is that of a follower, which was told by another that something
broke: a rank whose peer is gone is louder than the one that died. Pure.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class FailureClass(str, Enum):
    """The classes of failures, in the words that people read."""

    USER_CODE = "an error in the program"
    CRASH = "a crash"  # by a signal that the program got for what it did itself
    HOST_MEMORY = "out of host memory"
    GPU_MEMORY = "out of GPU memory"
    HARDWARE = "a fault of the hardware"
    NODE = "a node was lost"
    DISK = "no space on a disk"
    STORAGE = "a file system that failed"
    DAMAGED = "a damaged file"  # that the program loads: a checkpoint, most often
    NETWORK = "the network between nodes"
    NUMBERS = "the loss is no number"
    MISMATCH = "ranks that called different collectives"
    MISSING = "a rank that did not join a collective"
    STUCK_IN_IO = "a rank that waits for a file system"
    STUCK_IN_LOADER = "a rank that waits for its data loader"
    DEADLOCK = "a rank that waits for itself"
    BUSY = "a rank that computes and reports nothing"
    STOPPED = "a rank that is stopped"
    STRAGGLER = "a rank that is slow"
    START = "it could not start"
    SLURM = "Slurm ended it"
    NONE = "no failure"
    UNKNOWN = "unknown"


class Role(Enum):
    """The part that the rank that says a sentence has in the failure."""

    CAUSE = "cause"
    FOLLOWER = "follower"


class Sign(NamedTuple):
    """A sentence: what it is a sign of, and what to try. ``needles``: parts of it in lower case, of which it has one."""

    kind: FailureClass
    role: Role
    needles: tuple[str, ...]
    pattern: re.Pattern[str]
    remedy: str = ""


def _cause(kind: FailureClass, needles: str, pattern: str, remedy: str = "") -> Sign:
    return Sign(kind, Role.CAUSE, tuple(needles.split("|")), re.compile(pattern, re.I), remedy)


def _follower(kind: FailureClass, needles: str, pattern: str) -> Sign:
    return Sign(kind, Role.FOLLOWER, tuple(needles.split("|")), re.compile(pattern, re.I))


_SMALLER = (
    "smaller batches, gradient accumulation or activation checkpointing; PYTORCH_ALLOC_CONF=expandable_segments:True"
)
_HOST = "fewer loader workers, or more --mem; the memory watchdog shows how it grew"
_LEAVE_OUT = "leave the node out: ftsupervise nodes exclude NODE; and tell those who run the cluster"

# The order decides where several match one line: the more special one stands first.
SIGNS: tuple[Sign, ...] = (
    # ---------------------------------------------------------------- hardware
    _cause(FailureClass.HARDWARE, "xid", r"\bNVRM: Xid\b|\bXid \(PCI|\bXid[: ]+\d+", _LEAVE_OUT),
    _cause(FailureClass.HARDWARE, " ecc", r"uncorrectable (?:NVLink |double.bit )?ECC|\bDBE\b.*\bECC\b", _LEAVE_OUT),
    _cause(FailureClass.HARDWARE, "fallen off", r"fallen off the bus", _LEAVE_OUT),
    _cause(FailureClass.HARDWARE, "hardware", r"Uncorrectable hardware|CUDA error: .*hardware", _LEAVE_OUT),
    _cause(FailureClass.HARDWARE, "mce:", r"\bmce: \[Hardware Error\]", _LEAVE_OUT),
    _cause(
        FailureClass.HARDWARE,
        "no cuda-capable",
        r"no CUDA-capable device is detected|CUDA driver initialization failed",
        "nvidia-smi on that node; " + _LEAVE_OUT,
    ),
    # ---------------------------------------------------------------- memory
    _cause(
        FailureClass.GPU_MEMORY,
        "out of memory",
        r"\bCUDA (?:error: )?out of memory|torch\.(?:cuda\.)?OutOfMemoryError"
        r"|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        _SMALLER,
    ),
    _cause(FailureClass.HOST_MEMORY, "oom", r"\boom[-_ ]?kill|Detected \d+ oom|Out Of Memory", _HOST),
    _cause(FailureClass.HOST_MEMORY, "killed process", r"Killed process \d+", _HOST),
    _cause(
        FailureClass.HOST_MEMORY,
        "memoryerror|allocate memory",
        r"^(?:numpy\.\S*)?_?(?:Array)?MemoryError\b|Cannot allocate memory"
        r"|DefaultCPUAllocator: can't allocate memory",
        _HOST,
    ),
    _cause(
        FailureClass.HOST_MEMORY,
        "bus error|shared memory",
        r"DataLoader worker .* killed by signal: Bus error|insufficient shared memory",
        "more shared memory: --shm-size of a container, or mount -o remount,size= /dev/shm",
    ),
    _cause(
        FailureClass.HOST_MEMORY, "killed by signal: killed", r"DataLoader worker .* is killed by signal: Killed", _HOST
    ),
    # ---------------------------------------------------------------- disks
    _cause(
        FailureClass.DISK,
        "no space left",
        r"No space left on device",
        "make room, or: ftsupervise checkpoints prune; the disk watchdog tells it before it happens",
    ),
    _cause(FailureClass.DISK, "quota exceeded", r"Disk quota exceeded", "make room, or ask for a larger quota"),
    _cause(
        FailureClass.STORAGE,
        "stale file handle",
        r"Stale (?:NFS )?file handle",
        "start again; tell those who run the storage",
    ),
    _cause(
        FailureClass.STORAGE,
        "input/output error",
        r"Input/output error",
        "dmesg on that node; tell those who run the storage",
    ),
    _cause(
        FailureClass.STORAGE,
        "transport endpoint",
        r"Transport endpoint is not connected|Cannot send after transport endpoint",
        "the file system's client died on that node; " + _LEAVE_OUT,
    ),
    _cause(FailureClass.STORAGE, "read-only file system", r"Read-only file system", "tell those who run the storage"),
    _cause(
        FailureClass.DAMAGED,
        "zipfile|unpicklingerror|eoferror|pytorchstreamreader|unexpected eof|safetensorerror|all data for array|zlib.error",
        r"^(?:\w+\.)*Bad(?:Zip|Gzip)File: |^(?:\w+\.)*UnpicklingError: (?:pickle data was truncated|invalid load key)"
        r"|^EOFError: (?:Ran out of input|No data left in file|Compressed file ended)|^RuntimeError: PytorchStreamReader failed"
        r"|^RuntimeError: unexpected EOF, expected \d+ more bytes|^(?:\w+\.)*SafetensorError: Error while deserializing"
        r"|^ValueError: Failed to read all data for array|^zlib\.error: Error -\d",
        "where it is the checkpoint that it loads: ftsupervise checkpoints set-aside; else fetch that file anew",
    ),
    # ---------------------------------------------------------------- nodes and Slurm
    _cause(FailureClass.NODE, "node failure", r"Node failure on \S+|DUE TO NODE FAILURE"),
    _cause(FailureClass.NODE, "failed on node", r"Task launch for StepId=\S+ failed on node"),
    _cause(FailureClass.SLURM, "time limit", r"DUE TO TIME LIMIT"),
    _cause(FailureClass.SLURM, "preemption", r"DUE TO PREEMPTION"),
    _cause(FailureClass.SLURM, "job requeue", r"DUE TO JOB REQUEUE"),
    _cause(FailureClass.START, "unable to create step", r"srun: error: Unable to create step"),
    _cause(
        FailureClass.START,
        "execve",
        r"error: execve\(\): .*: No such file or directory",
        "the command is not there on that node: a module or an environment is not loaded",
    ),
    _cause(
        FailureClass.START, "command not found", r": command not found$", "a module or an environment is not loaded"
    ),
    _cause(
        FailureClass.START,
        "modulenotfounderror|importerror",
        r"^ModuleNotFoundError: |^ImportError: ",
        "the Python of the job lacks it: activate its environment in launch.setup",
    ),
    _cause(
        FailureClass.START,
        "can't open file",
        r"can't open file '.*': \[Errno 2\]",
        "the script is not there on that node",
    ),
    _cause(
        FailureClass.START,
        "address already in use|eaddrinuse",
        r"EADDRINUSE|address already in use",
        "another process holds the port where the ranks meet: take FTSUPERVISE_MASTER_PORT",
    ),
    _cause(
        FailureClass.START,
        "driver version is insufficient",
        r"CUDA driver version is insufficient",
        "a PyTorch built for the node's driver",
    ),
    # ---------------------------------------------------------------- crashes
    _cause(
        FailureClass.CRASH,
        "segmentation fault",
        r"Segmentation fault|Fatal Python error: Segmentation",
        "python -X faulthandler names the line; a C extension is the usual place",
    ),
    _cause(
        FailureClass.CRASH,
        "illegal memory access",
        r"CUDA error: an illegal memory access",
        "CUDA_LAUNCH_BLOCKING=1 names the kernel; the same node again speaks for its hardware",
    ),
    _cause(
        FailureClass.CRASH,
        "device-side assert",
        r"device-side assert triggered",
        "an index out of range, most often a label or a token: CUDA_LAUNCH_BLOCKING=1 names the line",
    ),
    _cause(
        FailureClass.CRASH,
        "unspecified launch failure|misaligned address",
        r"unspecified launch failure|CUDA error: misaligned address",
    ),
    _cause(
        FailureClass.CRASH,
        "illegal instruction",
        r"Illegal instruction",
        "a binary that was built for another processor",
    ),
    _cause(FailureClass.CRASH, "fatal python error", r"Fatal Python error: "),
    _cause(FailureClass.CRASH, "floating point exception", r"Floating point exception"),
    # ---------------------------------------------------------------- numbers
    _cause(
        FailureClass.NUMBERS,
        "nan|inf|non-finite",
        r"\bloss(?: is| became|:|=)? ?(?:nan|inf)\b|(?:NaN|Inf) (?:found|detected) in"
        r"|found NaN in|non-finite (?:loss|gradient)|Function '\w+' returned nan values",
        "go back to an older checkpoint: ftsupervise checkpoints set-aside; a lower learning rate, or other batches",
    ),
    # ---------------------------------------------------------------- collectives that differ
    _cause(
        FailureClass.MISMATCH,
        "gloo::enforcenotmet",
        r"gloo::EnforceNotMet|EnforceNotMet.*op\.preamble\.length",
        "the ranks give tensors of different sizes: compare the shapes, and batches at the end of an epoch",
    ),
    _cause(
        FailureClass.MISMATCH,
        "detected mismatch between",
        r"Detected mismatch between collectives on ranks",
        "the ranks call different collectives: look for a branch that only some of them take",
    ),
    # ---------------------------------------------------------------- those who were told by another
    _follower(FailureClass.MISSING, "watchdog caught", r"Watchdog caught collective operation timeout"),
    _follower(FailureClass.MISSING, "timed out waiting", r"Timed out waiting \d+ms for (?:recv|send) operation"),
    _follower(FailureClass.MISSING, "failed to pass monitoredbarrier", r"failed to pass monitoredBarrier"),
    _follower(FailureClass.NODE, "connection closed by peer", r"Connection closed by peer"),
    _follower(FailureClass.NODE, "connection reset by peer", r"Connection reset by peer"),
    _follower(FailureClass.NODE, "connection refused", r"Connection refused"),
    _follower(FailureClass.NODE, "broken pipe", r"Broken pipe"),
    _follower(FailureClass.NODE, "remote process exited", r"remote process exited or there was a network error"),
    _follower(FailureClass.NODE, "failed to recv", r"failed to recv, got 0 bytes"),
    _follower(
        FailureClass.NODE,
        "disterror|distbackenderror|diststoreerror|distnetworkerror",
        r"Dist(?:Backend|Store|Network)?Error",
    ),
    _follower(FailureClass.NODE, "ncclremoteerror|ncclsystemerror", r"ncclRemoteError|ncclSystemError"),
    _follower(
        FailureClass.NODE,
        "to avoid data inconsistency",
        r"To avoid data inconsistency, we are taking the entire process down",
    ),
    _follower(FailureClass.NODE, "childfailederror", r"ChildFailedError"),
    _follower(FailureClass.NODE, "signalexception", r"SignalException: Process \d+ got signal"),
    _follower(FailureClass.NODE, "sending process", r"Sending process \d+ closing signal"),
    _follower(FailureClass.NODE, "job step aborted|*** step", r"Job step aborted|\*\*\* STEP \S+ ON \S+ CANCELLED"),
    _follower(FailureClass.NODE, "terminated", r"srun: error: .*: tasks? \S+: Terminated"),
    _follower(
        FailureClass.NODE, "acquire gil|watchdog got stuck", r"Could not acquire GIL within|watchdog got stuck for"
    ),
)
# An exception that is in no table: a cause if it is not one of those by which a rank learns of another's end. Its name is what
# Python prints of a class, "load.<locals>.BadBatch": the last part begins with a capital, and is not in capitals alone.
TRACEBACK = "Traceback (most recent call last)"
EXCEPTION = re.compile(
    r"^(?:(?:[A-Za-z_]\w*|<locals>)\.)*(?:[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Warning|Failure)|(?=\w*[a-z])[A-Z]\w*)"
    r"(?::[ \t]*.*)?$"
)


def sign_in(line: str) -> Sign | None:
    """Return what ``line`` is a sign of; None for any other line."""
    low = line.lower()
    return next((one for one in SIGNS if any(part in low for part in one.needles) and one.pattern.search(line)), None)
