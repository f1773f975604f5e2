"""Ends what a test has left running: jobs of the local scheduler, which outlive the command that submitted them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil


def end_all_under(folder: Path) -> int:
    """Kill each process whose command line names ``folder``, or something in it. Return how many there were."""
    found = 0
    for one in psutil.process_iter(["pid", "cmdline"]):
        words = one.info["cmdline"] or ()
        if one.pid != os.getpid() and any(word == str(folder) or f"{folder}/" in word for word in words):
            found += 1
            try:
                one.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
    return found
