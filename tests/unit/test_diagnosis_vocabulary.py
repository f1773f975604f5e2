"""Real messages of Python, PyTorch, NCCL, CUDA, the kernel and Slurm, and what each is a sign of."""

from __future__ import annotations

import pytest

from ftsupervise.diagnosis.first_failure import ANCHORS
from ftsupervise.diagnosis.vocabulary import SIGNS, FailureClass, Role, sign_in

K = FailureClass
CAUSES = (
    (K.HARDWARE, "[ 8123.551] NVRM: Xid (PCI:0000:3b:00): 79, pid=21, name=python, GPU has fallen off the bus."),
    (K.HARDWARE, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    (K.HARDWARE, "kernel: NVRM: GPU at PCI:0000:65:00: fallen off the bus and is not responding; kernel error"),
    (K.HARDWARE, "RuntimeError: CUDA error: unknown error, Uncorrectable hardware error"),
    (K.HARDWARE, "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 7"),
    (K.HARDWARE, "RuntimeError: CUDA error: no CUDA-capable device is detected"),
    (K.GPU_MEMORY, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    (K.HOST_MEMORY, ("slurmstepd: error: Detected 1 oom_kill event in StepId=88.0. Some of the step tasks have "
     "been OOM Killed.")),
    (K.HOST_MEMORY, "Out of memory: Killed process 4711 (python) total-vm:8123456kB, anon-rss:7000000kB"),
    (K.HOST_MEMORY, "MemoryError: Unable to allocate 31.2 GiB for an array with shape (4194304, 1000) and data type float64"),
    (K.HOST_MEMORY, "OSError: [Errno 12] Cannot allocate memory"),
    (K.HOST_MEMORY, ("RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't "
     "allocate memory: you tried")),
    (K.HOST_MEMORY, ("RuntimeError: DataLoader worker (pid 9012) is killed by signal: Bus error. It is possible that "
     "dataloader's workers are out of shared memory.")),
    (K.HOST_MEMORY, "RuntimeError: DataLoader worker (pid(s) 9012) is killed by signal: Killed."),
    (K.DISK, "OSError: [Errno 28] No space left on device: '/scratch/ckpt/step-100/model.pt'"),
    (K.DISK, "OSError: [Errno 122] Disk quota exceeded"),
    (K.STORAGE, "OSError: [Errno 116] Stale file handle: '/data/shard-0012.bin'"),
    (K.STORAGE, "OSError: [Errno 5] Input/output error"),
    (K.STORAGE, "OSError: [Errno 107] Transport endpoint is not connected: '/lustre/run'"),
    (K.STORAGE, "OSError: [Errno 30] Read-only file system: 'log.txt'"),
    (K.DAMAGED, "zipfile.BadZipFile: Bad CRC-32 for file 'weights.npy'"),
    (K.DAMAGED, "zipfile.BadZipFile: File is not a zip file"),
    (K.DAMAGED, "gzip.BadGzipFile: Not a gzipped file (b'xx')"),
    (K.DAMAGED, "EOFError: No data left in file"),
    (K.DAMAGED, "EOFError: Ran out of input"),
    (K.DAMAGED, "EOFError: Compressed file ended before the end-of-stream marker was reached"),
    (K.DAMAGED, ("ValueError: Failed to read all data for array. Expected (1000,) = 1000 elements, could only read 359 "
     "elements. (file seems not fully written?)")),
    (K.DAMAGED, "_pickle.UnpicklingError: pickle data was truncated"),
    (K.DAMAGED, "_pickle.UnpicklingError: invalid load key, '\\x00'."),
    (K.DAMAGED, "zlib.error: Error -3 while decompressing data: incorrect header check"),
    (K.DAMAGED, ("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory. This is an "
     "internal miniz error.")),
    (K.DAMAGED, "RuntimeError: unexpected EOF, expected 500 more bytes. The file might be corrupted."),
    (K.DAMAGED, ("safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file "
     "not fully covered")),
    (K.NODE, "srun: error: Node failure on node-17"),
    (K.NODE, ("slurmstepd: error: *** STEP 77.0 ON node-3 CANCELLED AT 2026-11-02T10:11:12 DUE TO NODE "
     "FAILURE, SEE SLURMCTLD LOG ***")),
    (K.NODE, "srun: error: Task launch for StepId=91.0 failed on node node-2: Communication connection failure"),
    (K.SLURM, "slurmstepd: error: *** JOB 77 ON node-0 CANCELLED AT 2026-11-02T10:11:12 DUE TO TIME LIMIT ***"),
    (K.SLURM, "slurmstepd: error: *** JOB 77 ON node-0 CANCELLED AT 2026-11-02T10:11:12 DUE TO PREEMPTION ***"),
    (K.SLURM, "slurmstepd: error: *** JOB 77 ON node-0 CANCELLED AT 2026-11-02T10:11:12 DUE TO JOB REQUEUE ***"),
    (K.START, "srun: error: Unable to create step for job 12: More processors requested than permitted"),
    (K.START, "slurmstepd: error: execve(): python3.14: No such file or directory"),
    (K.START, "/var/spool/slurmd/job00012/slurm_script: line 9: torchrun: command not found"),
    (K.START, "ModuleNotFoundError: No module named 'flash_attn'"),
    (K.START, "python: can't open file '/home/u/trian.py': [Errno 2] No such file or directory"),
    (K.START, ("RuntimeError: The server socket has failed to listen on any local network address. port: 29500, "
     "EADDRINUSE, address already in use")),
    (K.START, "RuntimeError: CUDA driver version is insufficient for CUDA runtime version"),
    (K.CRASH, "srun: error: node-1: task 3: Segmentation fault"),
    (K.CRASH, "Fatal Python error: Segmentation fault"),
    (K.CRASH, "RuntimeError: CUDA error: an illegal memory access was encountered"),
    (K.CRASH, "RuntimeError: CUDA error: device-side assert triggered"),
    (K.CRASH, "RuntimeError: CUDA error: unspecified launch failure"),
    (K.CRASH, "srun: error: node-1: task 3: Illegal instruction"),
    (K.CRASH, "Fatal Python error: Aborted"),
    (K.CRASH, "srun: error: node-1: task 3: Floating point exception"),
    (K.NUMBERS, "step 4100: loss is nan, stopping training"),
    (K.NUMBERS, "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output."),
    (K.MISMATCH, "terminate called after throwing an instance of 'gloo::EnforceNotMet'"),
    (K.MISMATCH, ("RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: ALLREDUCE, but "
     "Rank 0 is running collective: BROADCAST.")),
)  # fmt: skip
FOLLOWERS = (
    ("[rank7]:[E1127 20:59:07.123456 ProcessGroupNCCL.cpp:632] [Rank 7] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=21)"),
    ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
    "10000ms for recv operation to complete"),
    "RuntimeError: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 3000 ms",
    "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.1.0.7]:32133",
    "RuntimeError: Connection reset by peer",
    "torch.distributed.DistNetworkError: The client socket has failed to connect to node-0:29500: Connection refused",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "NCCL WARN: remote process exited or there was a network error",
    "torch.distributed.DistBackendError: failed to recv, got 0 bytes",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356",
    "[E ProcessGroupNCCL.cpp:828] To avoid data inconsistency, we are taking the entire process down.",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4242 got signal: 15",
    "W1127 20:59 torch/distributed/elastic/multiprocessing/api.py:1010] Sending process 412 closing signal SIGTERM",
    "srun: Job step aborted: Waiting up to 32 seconds for job step to finish. (error)",
    "slurmstepd: error: *** STEP 88.0 ON node-1 CANCELLED AT 2026-11-02T10:11:12 ***",
    "srun: error: node-1: tasks 0-2,4: Terminated",
    "[E ProcessGroupNCCL.cpp:1496] [PG 0 Rank 3] Could not acquire GIL within 300000 ms on exit, possible GIL induced hang",
)  # fmt: skip
NOTHING = (
    "2026-11-27 20:36:11 step 1200 loss 2.31 lr 3.0e-4 error_rate 0.02",
    "UserWarning: The PyTorch API of nested tensors is in prototype stage",
    "loading finance dataset: 120 banana rows, 3 informative ones",
    "killing time until the queue is empty",
    "compiled with CUDA 12.8, no errors so far",
    "shard 12 is left out: zipfile.BadZipFile: File is not a zip file",
    "EOFError: EOF when reading a line",
)


@pytest.mark.parametrize(("kind", "line"), CAUSES)
def test_a_cause_is_known_by_its_message(kind: FailureClass, line: str) -> None:
    found = sign_in(line)
    assert found is not None and (found.kind, found.role) == (kind, Role.CAUSE)


@pytest.mark.parametrize("line", FOLLOWERS)
def test_a_rank_that_was_told_by_another_is_a_follower(line: str) -> None:
    found = sign_in(line)
    assert found is not None and found.role is Role.FOLLOWER


@pytest.mark.parametrize("line", NOTHING)
def test_an_ordinary_line_is_no_sign(line: str) -> None:
    assert sign_in(line) is None


def test_each_sentence_of_the_table_has_a_message_here() -> None:
    met = {id(sign_in(line)) for line in (*(line for _, line in CAUSES), *FOLLOWERS)}
    assert [one.needles for one in SIGNS if id(one) not in met] == []


def test_each_message_has_a_word_that_the_quick_look_sees() -> None:
    lines = [line.lower().encode() for line in (*(line for _, line in CAUSES), *FOLLOWERS)]
    assert [line for line in lines if not any(word in line for word in ANCHORS)] == []


def test_the_quick_look_leaves_digits_out_so_no_word_holds_one() -> None:
    words = [*(anchor.decode() for anchor in ANCHORS), *(needle for one in SIGNS for needle in one.needles)]
    assert [word for word in words if any(letter.isdigit() for letter in word)] == []
