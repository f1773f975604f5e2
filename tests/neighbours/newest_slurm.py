"""The newest Slurm of Debian, unpacked beside the installed one: for what the installed one does not have yet.

Its packages come from Debian's own mirror, through apt with folders of its own, which checks their signatures; nothing is
installed. Its programs get the loader and the libraries that were unpacked with them, because the libc of this machine is
older; the jobs that they start use this machine's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_SUITE = "sid"
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins")
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_CONF = """\
Dir::Etc::sourcelist "{root}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::State::lists "{root}/lists";
Dir::State::status "{root}/status";
Dir::Cache "{root}/cache";
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Check-Valid-Until "false";
Acquire::http::Timeout "20";
"""


class CannotUnpack(Exception):
    """It cannot be had here, and why."""


def unpack(root: Path) -> Path:
    """Unpack it below ``root``; return the prefix for a sandbox. Raises CannotUnpack."""
    if absent := [word for word in ("apt-get", "dpkg") if not shutil.which(word)]:
        raise CannotUnpack(f"this machine has no {absent[0]}")
    if not Path(_KEYS).exists():
        raise CannotUnpack(f"there is no {_KEYS}")
    for name in ("lists/partial", "cache/archives/partial", "tools", "libs", "slurm"):
        (root / name).mkdir(parents=True)
    (root / "status").touch()
    (root / "sources.list").write_text(f"deb [signed-by={_KEYS}] {_mirror()} {_SUITE} main\n")
    (root / "apt.conf").write_text(_CONF.format(root=root))
    own = {**os.environ, "APT_CONFIG": str(root / "apt.conf")}
    _run(["apt-get", "-qq", "update"], own, root)
    _run(["apt-get", "-qq", "-y", "--download-only", "install", *_PACKAGES], own, root)
    _run(["apt-get", "-qq", "download", "patchelf"], os.environ, root / "tools")  # of this machine's own suite
    _run(["dpkg", "-x", str(next((root / "tools").glob("*.deb"))), str(root / "tools")], own, root)
    for package in (root / "cache" / "archives").glob("*.deb"):
        into = "slurm" if package.name.startswith("slurm") else "libs"
        _run(["dpkg", "-x", str(package), str(root / into)], own, root)
    _join(root / "slurm", root / "libs", root / "tools" / "usr" / "bin" / "patchelf")
    return root / "slurm"


def _join(prefix: Path, libs: Path, patchelf: Path) -> None:
    """Lead the programs in ``prefix`` to the libraries in ``libs``."""
    loader = next(iter(sorted(libs.glob("usr/lib/*/ld-linux-*.so.*"))), None)
    if loader is None:
        raise CannotUnpack("the packages hold no loader")
    own = next(prefix.glob("usr/lib/*/slurm-wlm"))
    path = f"{loader.parent}:{own}"
    for program in (*prefix.glob("usr/bin/*"), *prefix.glob("usr/sbin/*")):
        if not program.is_symlink() and program.read_bytes()[:4] == b"\x7fELF":
            words = ["--set-interpreter", str(loader), "--force-rpath", "--set-rpath", path, str(program)]
            _run([str(patchelf), *words], os.environ, prefix)


def _mirror() -> str:
    """Return the mirror that this machine uses."""
    line = re.compile(r"^(?:URIs:|deb )[^#\n]*?(https?://\S+/debian)/?(?=\s)", re.M)
    for path in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")):
        if path.exists() and (found := line.search(path.read_text())):
            return found[1]
    return "http://deb.debian.org/debian"


def _run(words: Sequence[str], env: Mapping[str, str], root: Path) -> None:
    try:
        done = subprocess.run(words, env=env, cwd=root, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        raise CannotUnpack(f"{words[0]} gave no answer within 300 s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise CannotUnpack(f"Debian's {_SUITE} cannot be had here: {words[0]}: {said[-1]}")
