"""Machines that listen: our own JSON, PagerDuty, Alertmanager, a template of one's own, and Apprise."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.alerts.journal import Journal
from ftsupervise.findings import Finding, Severity
from ftsupervise.truth import Health
from tests.story.alerting_scene import RUN, T0, bad, good, minutes, secret, settings, tick


class Listener:
    """Keeps what is posted; answers ``status``, with ``answer`` as its body."""

    def __init__(self) -> None:
        self.heard: list[tuple[dict[str, str], Any]] = []
        self.status, self.answer = 202, ""
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if listener.status < 300:
                    listener.heard.append((dict(self.headers.items()), json.loads(body)))
                self.send_response(listener.status)
                self.send_header("Content-Length", str(len(listener.answer)))
                self.end_headers()
                self.wfile.write(listener.answer.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()


@pytest.fixture
def listener() -> Iterator[Listener]:
    one = Listener()
    yield one
    one.server.shutdown()
    one.server.server_close()


def night(journal: Journal, webhook: dict[str, Any]) -> None:
    alerts = settings([{"webhook": webhook}], repeat="1h")
    for at, finding in ((0, bad()), (60, bad()), (65, good())):
        tick(journal, alerts, minutes(at), finding)


def test_pagerduty_joins_trigger_and_resolve_by_one_key(listener: Listener, journal: Journal, tmp_path: Path) -> None:
    night(journal, {"shape": "pagerduty", "url": listener.url, "key_file": secret(tmp_path, "key", "R0UT1NG")})
    bodies = [body for _, body in listener.heard]
    assert [body["event_action"] for body in bodies] == ["trigger", "trigger", "resolve"]
    assert len({body["dedup_key"] for body in bodies}) == 1 and len(bodies[0]["dedup_key"]) <= 255
    assert all(body["routing_key"] == "R0UT1NG" for body in bodies)
    assert bodies[0]["payload"]["severity"] == "critical" and bodies[0]["payload"]["source"] == RUN


def test_alertmanager_gets_the_same_labels_and_an_end(listener: Listener, journal: Journal) -> None:
    night(journal, {"shape": "alertmanager", "url": listener.url})
    first, again, over = (body[0] for _, body in listener.heard)
    assert first["labels"] == again["labels"] == over["labels"]
    assert over["startsAt"] == first["startsAt"] < over["endsAt"] < first["endsAt"] < again["endsAt"]


def test_our_own_json_carries_a_key_a_bearer_and_every_notice(
    listener: Listener, journal: Journal, tmp_path: Path
) -> None:
    night(journal, {"url": listener.url, "key_file": secret(tmp_path, "key", "b34r3r")})
    assert [body["items"][0]["reason"] for _, body in listener.heard] == ["fired", "repeated", "resolved"]
    headers, body = listener.heard[0]
    assert headers["Authorization"] == "Bearer b34r3r" and headers["Idempotency-Key"] == body["key"]


def test_machines_hear_of_each_of_many_so_that_each_can_end(
    listener: Listener, journal: Journal, tmp_path: Path
) -> None:
    about = {"shape": "pagerduty", "url": listener.url, "key_file": secret(tmp_path, "key", "R0UT1NG")}
    alerts = settings([{"webhook": about}])
    for at, health in ((0, Health.BAD), (5, Health.OK)):
        many = [Finding(RUN, "hang", f"rank {n}", health, Severity.WARNING, "silent", T0) for n in range(50)]
        tick(journal, alerts, minutes(at), *many)
    began = {b["dedup_key"] for _, b in listener.heard if b["event_action"] == "trigger"}
    ended = {b["dedup_key"] for _, b in listener.heard if b["event_action"] == "resolve"}
    assert len(began) == 50 and began == ended


def test_a_template_of_ones_own_says_what_is_posted(listener: Listener, journal: Journal, tmp_path: Path) -> None:
    template = tmp_path / "matrix.j2"
    template.write_text('{"text": {{ m.title | tojson }}}')
    night(journal, {"url": listener.url, "template": str(template)})
    assert listener.heard[0][1] == {"text": f"[FIRING] {RUN}: 3.2 TB free on /scratch, less than 5 TB"}


@pytest.mark.parametrize(
    ("status", "broken"), [(500, False), (429, False), (404, False), (410, True), (401, False), (302, False)]
)
def test_an_answer_is_read_for_what_it_means(listener: Listener, journal: Journal, status: int, broken: bool) -> None:
    listener.status = status
    alerts = settings([{"webhook": {"url": listener.url}}])
    tick(journal, alerts, T0, bad())
    assert bool(journal.read().receivers["webhook"].broken) == broken
    assert bool(journal.read().receivers["webhook"].odd) == (status in (401, 404, 302))
    listener.status = 200
    tick(journal, alerts, minutes(5), bad())
    assert len(listener.heard) == (0 if broken else 1)


def test_apprise_carries_it_to_everything_else(listener: Listener, journal: Journal, tmp_path: Path) -> None:
    pytest.importorskip("apprise")
    url = listener.url.replace("http://", "json://")
    alerts = settings([{"apprise": {"urls_file": secret(tmp_path, "urls", url)}}])
    tick(journal, alerts, T0, bad())
    assert "3.2 TB free" in listener.heard[0][1]["message"] and "[FIRING]" in listener.heard[0][1]["title"]


def test_apprise_calls_nobody_whom_a_line_of_a_log_names(listener: Listener, journal: Journal, tmp_path: Path) -> None:
    pytest.importorskip("apprise")
    url = listener.url.replace("http://", "json://")
    alerts = settings([{"apprise": {"urls_file": secret(tmp_path, "urls", url)}}])
    tick(journal, alerts, T0, replace(bad(), summary="@everyone come", detail="<@42> @here"))
    said = listener.heard[0][1]["title"] + listener.heard[0][1]["message"]
    assert "everyone come" in said and not any(call in said for call in ("@everyone", "@here", "<@42"))


def test_apprise_that_is_missing_or_given_nonsense_is_a_sentence(journal: Journal, tmp_path: Path) -> None:
    alerts = settings([{"apprise": {"urls_file": secret(tmp_path, "urls", "nonsense://secret-thing")}}])
    _, delivered = tick(journal, alerts, T0, bad())
    assert delivered.failed and "secret-thing" not in delivered.failed[0][1]
    assert "pip install" in delivered.failed[0][1] or "not one that Apprise understands" in delivered.failed[0][1]
