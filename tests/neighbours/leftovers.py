"""Ends what a test has left running: jobs of the local scheduler, which outlive the command that submitted them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil


def end_all_under(folder: Path) -> None:
    """Kill each process whose command line names ``folder``, or something in it."""
    for one in psutil.process_iter(["pid", "cmdline"]):
        words = one.info["cmdline"] or ()
        if one.pid != os.getpid() and any(word == str(folder) or f"{folder}/" in word for word in words):
            try:
                one.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
