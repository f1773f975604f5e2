"""A watchdog and a receiver of another package: a real wheel, installed beside ftsupervise into an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from ftsupervise.scheduler.local import Local

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "neighbours" / "readme_package"
HEAD = "from ftsupervise.config.fields import Section\nclass Settings(Section): pass\n"  # of a module with a watchdog
SETTINGS = """\
name: t
scheduler: local
launch: {command: 'true', jobs: 1}
watch:
  readme: {path: README, every: 1m}
  memory: {}
alerts:
  watchdogs: {readme: {repeat: 1h}}
  receivers:
    - spool: {folder: spool}
"""
WITHOUT_A_PATH = MappingProxyType[str, str]({})


class Home:
    """An environment with ftsupervise and the packages that were installed into it, and a folder to work in."""

    def __init__(self, venv: Path, folder: Path) -> None:
        self.venv, self.folder = venv, folder
        self.site = next(venv.glob("lib/python*/site-packages"))
        self.away: Path | None = None
        folder.mkdir()
        self.write(SETTINGS)

    def write(self, text: str, name: str = "ftsupervise.yaml") -> None:
        (self.folder / name).write_text(text)

    def say(self, *words: str, code: int, env: Mapping[str, str] = WITHOUT_A_PATH) -> str:
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "FTSUPERVISE_RUN_DIR")}
        argv = [str(self.venv / "bin/python"), "-I", str(ROOT / "ftsupervise/start.py"), *words]
        given = {**kept, **env}
        done = subprocess.run(argv, cwd=self.folder, env=given, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def take_away(self) -> None:
        """Take the metadata of the example package out until the end of the test."""
        [info] = self.site.glob("readme_watch-*.dist-info")
        self.away = info.rename(self.folder / info.name)

    def add(self, name: str, watchdog: str, code: str) -> None:
        """Install a package ``name`` with one module, which has ``code``, by hand: as a wheel is unpacked."""
        info = self.site / f"{name}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(f"[ftsupervise.watchdogs]\n{watchdog} = {name}\n")
        (self.site / f"{name}.py").write_text(code)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example package, built by its own pyproject.toml."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "-w", str(folder), str(folder / "source")], check=True, timeout=180)
    return next(folder.glob("readme_watch-1.0-*.whl"))


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example package is installed; ftsupervise and its libraries are borrowed from the environment of the tests."""
    venv = tmp_path_factory.mktemp("home") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    site = next(venv.glob("lib/python*/site-packages"))
    ours = sysconfig.get_path("purelib")
    (site / "borrowed.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(venv / "bin/python"),
        "install",
        "-qq",
        "--no-deps",
        "--no-index",
    ]
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*pip, str(wheel)], check=True, timeout=120, env=env)
    return venv


@pytest.fixture
def home(venv: Path, tmp_path: Path) -> Iterator[Home]:
    """A folder to work in; what a test installs besides is gone after it."""
    one = Home(venv, tmp_path / "work")
    before = set(one.site.iterdir())
    yield one
    for path in set(one.site.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if one.away is not None:
        one.away.rename(one.site / one.away.name)


def findings(said: str) -> dict[str, str]:
    """The health of each finding of ``check --json``, by watchdog and subject."""
    page = json.loads(said[said.index("{") :])
    return {f"{one['watchdog']} {one['subject']}": one["health"] for one in page["findings"]}


def test_the_finding_of_another_packages_watchdog_is_delivered_by_another_packages_receiver(home: Home) -> None:
    spool, run = home.folder / "spool", home.folder / "runs" / "t"
    spool.mkdir()
    run.mkdir(parents=True)
    assert "fine" in home.say("config", "check", code=0)
    home.say("watch", "--only", "readme", code=1)
    [page] = spool.iterdir()
    assert f"[FIRING] t: {home.folder}/README is gone" in page.read_text(), "relative to the file, as any path"
    memory = json.loads((run / "watch" / "memory.json").read_text())
    assert memory["watchdogs"]["readme"]["checks"] == 1

    (home.folder / "README").touch()
    home.say("watch", "--only", "readme", code=0)
    assert sorted(one.read_text()[:10] for one in spool.iterdir()) == ["[FIRING] t", "[RESOLVED]"]
    assert "delivered by spool" in home.say("notify", "test", code=0)
    seen = findings(home.say("check", "all", "--json", code=2))
    assert seen["readme README"] == "ok" and "is-running job" in seen
    assert findings(home.say("check", "readme", "--json", code=0)).keys() == {"readme README", "readme watchdog"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", "ok      receiver spool   its settings can be used"),
        ("def address(settings): return '127.0.0.1', 1", "wrong   receiver spool   127.0.0.1:1 cannot be reached: "),
        ("def address(settings): return 1 / 0", "wrong   receiver spool   spool: ZeroDivisionError: division by zero"),
        ("raise RuntimeError('old')", " cannot be loaded: RuntimeError: old"),
    ],
)
def test_doctor_tries_a_receiver_of_another_package(home: Home, more: str, said: str) -> None:
    module = home.site / "readme_watch" / "receiver.py"
    before = module.read_text()
    module.write_text(f"{before}\n{more}\n")
    try:
        assert said in home.say("doctor", code=1, env={"FTSUPERVISE_STATE_DIR": str(home.folder / "state")})
    finally:
        module.write_text(before)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("path: README", "pth: README", "5:12: watch.readme: unknown key 'pth'; did you mean 'path'?"),
        ("every: 1m", "longest: many", "5:35: watch.readme.longest: expected a size"),
        ("every: 1m", "longest: [1]", "5:35: watch.readme.longest: expected a size"),
        ("every: 1m", "every: 5", "5:33: watch.readme.every: "),
        ("readme: {path: README, every: 1m}", "readme: {}", "5:3: watch.readme.path: missing"),
        ("readme: {path: README, every: 1m}", "readme: [1]", "5:11: watch.readme: expected 'key: value' lines, got"),
        ("  readme: {", "  readmee: {", "5:3: watch: unknown key 'readmee'; no watchdog of ours is called so, and no"),
        ("folder: spool", "folder: spool, suffix: doc", "10:38: alerts.receivers[0].spool.suffix: expected 'txt' or"),
        ("spool: {", "spol: {", "10:7: alerts.receivers[0]: unknown key 'spol'"),
        ("watchdogs: {readme", "watchdogs: {readmee", "8:24: alerts.watchdogs.readmee: no watchdog is called"),
    ],
)
def test_a_wrong_setting_of_another_package_is_told_at_its_place(
    home: Home, before: str, after: str, said: str
) -> None:
    home.write(SETTINGS.replace(before, after))
    assert f"ftsupervise.yaml:{said}" in home.say("config", "check", code=78)


def test_settings_of_other_packages_are_shown_and_written_as_all_others(home: Home) -> None:
    shown = home.say("config", "show", code=0)
    assert f"{home.folder}/README" in shown and "longest" in shown and "suffix" in shown
    home.write("".join(f"{line}\n" for line in shown.splitlines()))
    assert home.say("config", "show", code=0) == shown


@pytest.mark.fault(
    "A package that brings a watchdog is broken: its import or its check raises, exits, gives nonsense or does not end",
    "one sentence says which package and why; the findings of all other watchdogs are there",
)
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_module_anywhere", "cannot be loaded: ModuleNotFoundError: No module named"),
        ("raise SystemExit(0)", "cannot be loaded: SystemExit: 0"),
        ("", "cannot be used: lame.Settings is no subclass of Section"),
        ("{head}", "cannot be used: lame has no function check"),
        ("{head}def check(look, settings): raise SystemExit(3)", "the lame watchdog wanted to exit (3)"),
        ("{head}def check(look, settings): return ['fine']", "the lame watchdog gave str, and not a Finding"),
        ("{head}def check(look, settings): 1 / 0", "the lame watchdog itself failed: ZeroDivisionError"),
        (
            "{head}def check(look, settings): look.memory['x'] = look; return []",
            "the lame watchdog itself failed: Type",
        ),
    ],
)
def test_a_broken_watchdog_of_another_package_says_one_sentence_and_blinds_no_other(
    home: Home, code: str, said: str
) -> None:
    home.add("lame", "lame", code.replace("{head}", HEAD))
    home.write(SETTINGS.replace("watch:\n", f"watch:\n  lame: {'{}' if '{head}' in code else '{some: words}'}\n"))
    (home.folder / "runs" / "t").mkdir(parents=True)
    (home.folder / "README").touch()
    told = home.say("check", "all", code=2)
    assert said in told and "Traceback" not in told
    seen = findings(home.say("check", "all", "--json", code=2))
    assert seen["lame watchdog"] == "bad" and seen["readme README"] == "ok" and "disk" in " ".join(seen)


def test_a_watchdog_of_another_package_that_does_not_end_is_left_behind(home: Home) -> None:
    home.add("lame", "lame", f"{HEAD}import os\ndef check(look, settings): os.read(os.pipe()[0], 1)\n")
    sooner = "from ftsupervise.watch import watchdogs\nwatchdogs.PLUGIN_WITHIN = 1.0\n"
    home.add("sooner", "sooner", f"{HEAD}{sooner}def check(look, settings): return []\n")
    home.write(SETTINGS.replace("watch:\n", "watch:\n  sooner: {}\n  lame: {}\n"))
    (home.folder / "runs" / "t").mkdir(parents=True)
    told = home.say("check", "all", code=2)
    assert "the lame watchdog did not end within 1 s" in told and "README is gone" in told


def test_a_run_that_was_launched_is_watched_where_the_package_is_missing(
    home: Home, until: Callable[..., object]
) -> None:
    """The settings as launched were judged by the Python that launched; another one says what it lacks."""
    home.say("launch", code=0)
    until(lambda: not Local().queue(), "the end of the chain")
    run = home.folder / "runs" / "t"
    home.take_away()
    (home.folder / "ftsupervise.yaml").unlink()
    seen = findings(told := home.say("check", "all", str(run), "--json", code=2))
    assert seen["readme watchdog"] == "bad" and any(name.startswith("disk") for name in seen)
    assert "no package of this Python brings the watchdog readme" in told


@pytest.mark.threat(
    "A folder on PYTHONPATH has a distribution with entry points, or a module of the name of a plug-in's.",
    "It brings no watchdog and no receiver, and a plug-in whose module would come from there is refused before it is imported.",
)
def test_a_package_on_pythonpath_or_in_the_folder_brings_no_watchdog_and_no_module(home: Home, tmp_path: Path) -> None:
    other, mark = tmp_path / "other", tmp_path / "ran"
    (other / "planted-1.0.dist-info").mkdir(parents=True)
    (other / "planted-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (other / "planted-1.0.dist-info" / "entry_points.txt").write_text("[ftsupervise.watchdogs]\nplanted = planted\n")
    for name in ("planted", "readme_watch"):
        (other / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\n")
    home.write(SETTINGS.replace("watch:\n", "watch:\n  planted: {}\n"))
    for folder in (other, home.folder):
        if folder != other:
            shutil.copytree(other, folder, dirs_exist_ok=True)
        said = home.say("config", "check", code=78, env={"PYTHONPATH": str(folder)})
        assert "unknown key 'planted'" in said
    assert not mark.exists()
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from ftsupervise.cli import main; main()"
    home.write(SETTINGS)
    (home.folder / "runs" / "t").mkdir(parents=True)
    argv = [str(home.venv / "bin/python"), "-I", "-c", program, str(other), "check", "all"]
    done = subprocess.run(argv, cwd=home.folder, capture_output=True, text=True, timeout=120)
    assert f"its module readme_watch would come from {other}/readme_watch.py" in done.stdout + done.stderr
    assert not mark.exists()


@pytest.mark.threat(
    "Settings of another account name an installed plug-in, with settings that would make it read your files.",
    "Nothing is imported for them; they are shown and not used, until `--trust` accepts the file.",
)
@pytest.mark.root
def test_the_settings_of_another_account_import_no_package_and_use_none(home: Home) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file to another account")
    mark = home.folder / "imported"
    home.add("told", "told", f"open({str(mark)!r}, 'w')\n")
    theirs = home.folder.parent / "theirs"
    theirs.mkdir()
    page = theirs / "ftsupervise.yaml"
    page.write_text(SETTINGS.replace("watch:\n", "watch:\n  told: {file: /etc/shadow}\n"))
    (theirs / "runs" / "t").mkdir(parents=True)
    for place in (theirs, page, theirs / "runs", theirs / "runs" / "t"):
        os.chown(place, 65534, 65534)
    said = home.say("check", "all", str(page), code=2)
    assert (
        'watch.told: {"file":"/etc/shadow"}' in said and "watch.readme: " in said and "alerts.receivers spool" in said
    )
    assert not mark.exists() and "README" not in said.replace("watch.readme: ", "").replace('"path":"README"', "")


def test_two_packages_of_one_name_are_both_named(home: Home) -> None:
    home.add("second", "readme", "")
    (home.folder / "runs" / "t").mkdir(parents=True)
    said = home.say("check", "all", code=2)
    assert "the watchdog readme is brought by readme-watch 1.0 and second 2.0" in said


def test_nothing_is_looked_up_where_every_name_is_ours(home: Home) -> None:
    home.write("name: t\nlaunch: {command: a}\nwatch: {memory: {}}\nalerts: {receivers: [{file: {path: mail}}]}\n")
    program = (
        "from pathlib import Path; from ftsupervise.config.load import load; from ftsupervise.host import plugins;"
        "load(Path('ftsupervise.yaml')); print(plugins.installed.cache_info().currsize)"
    )
    argv = [str(home.venv / "bin/python"), "-c", program]
    assert subprocess.run(argv, cwd=home.folder, capture_output=True, text=True, check=True).stdout.strip() == "0"
