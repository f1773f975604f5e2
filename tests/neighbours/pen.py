"""A scheduler in one file, whole and small: a pen of scripts that wait until somebody starts them, each a page in a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.errors import SchedulerUnavailable
from ftsupervise.host.ownership import user_name
from ftsupervise.model import Job, JobState, Submitted
from ftsupervise.scheduler.parse import directives

if TYPE_CHECKING:
    from ftsupervise.scheduler import Scheduler


class Pen:
    """The port ``Scheduler`` over the folder that ``PEN`` names."""

    kind = "pen"

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.root = Path((os.environ if env is None else env).get("PEN", "/var/spool/pen"))
        self.warnings: set[str] = set()

    def queue(self, *, users: Sequence[str] = ()) -> tuple[Job, ...]:
        with self._asked():
            return tuple(
                self._job(self.root / name) for name in sorted(os.listdir(self.root)) if name.endswith(".json")
            )

    def submit(self, script: str, *, script_path: Path, token: str, env: Mapping[str, str] | None = None) -> Submitted:
        options = directives(script)
        page = {"name": options["job-name"], "comment": options["comment"], "held": False}
        with self._asked():
            number = len(os.listdir(self.root)) + 1
            (self.root / f"{number}.json").write_text(json.dumps(page))
        return Submitted(f"pen-{number}")

    def find(self, token: str) -> tuple[Job, ...]:
        return tuple(job for job in self.queue() if token in job.comment)

    def cancel(self, job_id: str, *, only_pending: bool = False) -> None:
        with self._asked(), suppress(FileNotFoundError):
            self._page(job_id).rename(self._page(job_id).with_suffix(".gone"))  # its number is given to no other

    def hold(self, job_id: str) -> None:
        self._change(job_id, held=True)

    def release(self, job_id: str) -> None:
        self._change(job_id, held=False)

    def put_back(self, job_id: str) -> bool:
        return False  # nothing here knows whether a script runs

    def remark(self, job_id: str, comment: str) -> None:
        self._change(job_id, comment=comment)

    def describe(self, job_id: str) -> Job | None:
        return next((job for job in self.queue() if job.id == job_id), None)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SchedulerUnavailable(f"the pen {self.root} cannot be used: {error.strerror}") from None

    def _page(self, job_id: str) -> Path:
        return self.root / f"{job_id.removeprefix('pen-')}.json"

    def _change(self, job_id: str, **changes: object) -> None:
        page = self._page(job_id)
        with self._asked(), suppress(FileNotFoundError):
            page.write_text(json.dumps({**json.loads(page.read_text()), **changes}))

    def _job(self, page: Path) -> Job:
        one, job_id = json.loads(page.read_text()), f"pen-{page.stem}"
        reason = "JobHeldUser" if one["held"] else ""
        return Job(job_id, job_id, one["name"], user_name(), JobState.PENDING, reason, comment=one["comment"])


if TYPE_CHECKING:
    _WHOLE: Scheduler = Pen()
