"""What a person reads when a setting is wrong: the place, the key, the sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from pydantic import Discriminator, Field, Tag

from ftsupervise.config.fields import Duration, Share, Strict, wrong_at
from ftsupervise.config.load import NO_SETTINGS_ANY_MORE, loads, validated
from ftsupervise.config.strict_yaml import parse
from ftsupervise.errors import ConfigError

FINE = "name: x\nlaunch:\n  command: a\n"


def said(text: str, environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loads(text, environ=environ or {})
    return caught.value.message.splitlines()


def launch(line: str) -> str:
    """The one sentence about one more line in ``launch:``, which stands in line 4."""
    (sentence,) = said(f"{FINE}  {line}\n")
    return sentence.removeprefix("ftsupervise.yaml:4:")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("nodes: '4'", "10: launch.nodes: expected a whole number, got '4'; type nodes: 4 without quotes"),
        ("nodes: 0", "10: launch.nodes: expected at least 1, got 0"),
        ("nodes: 1.5", "10: launch.nodes: expected a whole number, got 1.5"),
        ("nodes: true", "10: launch.nodes: expected a whole number, got true"),
        ("nodes:", "9: launch.nodes: expected a whole number, got nothing"),
        ("jobs: 1001", "9: launch.jobs: expected at most 1000, got 1001"),
        ("requeue: 'no'", "12: launch.requeue: expected true or false, got 'no'; type requeue: false"),
        ("partition: 5", '14: launch.partition: expected text, got 5; type partition: "5"'),
        (
            "partition: a b",
            "14: launch.partition: expected a name, or several with ',' between, such as \"gpu\", got 'a b'",
        ),
        ("exclude: node-1", "12: launch.exclude: expected a list, got 'node-1'; type exclude: [\"node-1\"]"),
        ("exclude: [n1, 'n[1-']", "17: launch.exclude[1]: expected a node, or a range of nodes, such as"),
        ("gpus_per_node: 2.5", "18: launch.gpus_per_node: expected a whole number or text, got 2.5"),
        ("gpus_per_node: h100", "18: launch.gpus_per_node: expected a number of GPUs, or a type and a number, such as"),
        ("gpus_per_node: 0", "18: launch.gpus_per_node: expected at least 1, got 0"),
        ("chain: dasy", "10: launch.chain: expected 'array' or 'daisy', got 'dasy'; did you mean 'daisy'?"),
        ("mem: 100%", "8: launch.mem: expected Slurm's form of memory per node"),
        ("signal: KILL", "11: launch.signal: no program can answer this signal"),
        ("signal: USR3", '11: launch.signal: expected a signal such as "USR1"'),
        ("time: 90", '9: launch.time: write the time limit in quotes, such as time: "20:00:00"'),
        ("time: '90'", "9: launch.time: expected a duration such as"),
        ("time: 0s", "9: launch.time: expected more than 0s, got '0s'"),
        ("container: ['']", "14: launch.container: empty; write the command"),
        ("modules: ['a;b']", "13: launch.modules[0]: expected a module as 'module load' takes it"),
        ("srun_options: [x]", "18: launch.srun_options[0]: expected an option that begins with '-'"),
        ("env: {A-B: x}", "9: launch.env.A-B: expected a variable name"),
        ("env: {A: true}", '12: launch.env.A: expected text, got true; type A: "true"'),
        ("env: {SLURM_X: a}", "18: launch.env.SLURM_X: this name belongs to Slurm or ftsupervise"),
        ("env: {FTSUPERVISE_RUN: a}", "26: launch.env.FTSUPERVISE_RUN: this name belongs to"),
        ('setup: "a\\0b"', "10: launch.setup: control character U+0000"),
        ('output: "a\\nb"', "11: launch.output: a line break or tab; this setting is one line"),
        ("template: x/${NO_SUCH}", "13: launch.template: ${NO_SUCH} is not set in the environment; export NO_SUCH"),
        ("template: $HOME/x", "13: launch.template: $HOME is not filled in; write ${HOME}, or $$HOME for these char"),
        ("gpu: 8", "3: launch: unknown key 'gpu'; did you mean 'gpus_per_node'?"),
        ("tmplate: x", "3: launch: unknown key 'tmplate'; did you mean 'template'?"),
        ("spare-nodes: 1", "3: launch: unknown key 'spare-nodes'; did you mean 'spare_nodes'?"),
        ("open_mode: append", "3: launch: unknown key 'open_mode'; ftsupervise always appends: leave it out"),
        ("open-mode: truncate", "3: launch: unknown key 'open-mode'; ftsupervise always appends: leave it out"),
        ("queue: gpu", "3: launch: unknown key 'queue'; did you mean 'partition'?"),
        ("time_limit: '2h'", "3: launch: unknown key 'time_limit'; did you mean 'time'?"),
        ("time-limit: '2h'", "3: launch: unknown key 'time-limit'; did you mean 'time'?"),
        ("walltime: '2h'", "3: launch: unknown key 'walltime'; did you mean 'time'?"),
        ("run_dir: x", "3: launch: unknown key 'run_dir'; it is known as run_dir"),
        ("zzz: x", "3: launch: unknown key 'zzz'; known here: command, srun, srun_options, jobs, "),
    ],
)
def test_a_wrong_value_gets_its_place_and_what_to_type(line: str, sentence: str) -> None:
    assert launch(line).startswith(sentence)


def test_a_duration_without_its_unit_is_told_how_to_be_written_and_zero_how_to_turn_the_wait_off() -> None:
    assert launch("restart: {back_off: 0}").endswith("got 0; type 0s for none")
    assert launch("restart: {stop_within: 90}").endswith("got 90; type 90s, 90m or 90h")
    assert not loads(f"{FINE}  restart: {{back_off: 0s}}\n", environ={}).launch.restart.back_off


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--array=1-4", "use launch.jobs and launch.chain instead"),
        ("--signal=B:TERM@60", "use launch.signal and launch.warn instead"),
        ("--dependency=afterany:1", "use ftsupervise launch --after JOBID instead"),
        ("--job-name=x", "use name instead"),
        ("--output=x", "use launch.output instead"),
        ("--comment=x", "ftsupervise finds its jobs by it"),
        ("--dep=afterany:1", "--dep is short for --dependency"),
        ("-p gpu", "expected one option of sbatch, written --key=value"),
        ("--mail-type END", "expected one option of sbatch, written --key=value"),
        ("exclusive", "expected one option of sbatch, written --key=value"),
    ],
)
def test_an_sbatch_option_that_ftsupervise_sets_itself_is_refused_with_the_setting_to_use(
    option: str, sentence: str
) -> None:
    assert sentence in launch(f'sbatch: ["{option}"]')


@pytest.mark.parametrize("option", ["--exclusive", "--mail-type=END", "--no-kill", "--gres=gpu:8", "--licenses=a@b:1"])
def test_other_sbatch_options_pass(option: str) -> None:
    assert loads(f'{FINE}  sbatch: ["{option}"]').launch.sbatch == (option,)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("gpus_per_task: 1", 'write it as an option of sbatch: sbatch: ["--gpus-per-task=1"]'),
        ("gpus-per-task: 1", 'write it as an option of sbatch: sbatch: ["--gpus-per-task=1"]'),
        ("contiguous: true", 'sbatch: ["--contiguous"]'),
        ("ntasks_per_node: 8", "for sbatch's --ntasks-per-node use launch.tasks_per_node instead"),
        ("job_name: x", "for sbatch's --job-name use name instead"),
        ("dependency: afterany:1", "use ftsupervise launch --after JOBID instead"),
        ("mail_type: END", "ftsupervise sends the messages itself: name its receivers in alerts.receivers"),
        ("mail-user: ada@example.org", "name its receivers in alerts.receivers, such as - email:"),
        ("comment: x", "write nothing: ftsupervise finds its jobs by it"),
    ],
)
def test_a_key_that_is_an_option_of_sbatch_says_what_to_write_instead(line: str, sentence: str) -> None:
    said_now = launch(line)
    assert sentence in said_now
    assert "did you mean" not in said_now


@pytest.mark.fault(
    "A misspelt watchdog in `alerts.watchdogs` or in a route is never reached.",
    "It is refused when the file is read.",
)
@pytest.mark.parametrize(
    ("alerts", "sentence"),
    [
        ("watchdogs: {dsk: {hold: 1m}}", "alerts.watchdogs.dsk: no watchdog is called 'dsk'; did you mean 'disk'?"),
        (
            "routes: [{watchdog: [zzz], to: []}]",
            "alerts.routes[0].watchdog: no watchdog is called 'zzz'; there are: is-r",
        ),
    ],
)
def test_a_rule_for_a_watchdog_that_nobody_knows_is_refused(alerts: str, sentence: str) -> None:
    (found,) = said(f"name: x\nlaunch: {{command: a}}\nalerts: {{{alerts}}}\n")
    assert sentence in found


def test_rules_may_name_what_is_found_beside_the_watchdogs() -> None:
    for name in ("is_running", "is-running", "storage", "slurm", "cron", "receiver", "exec"):
        assert loads(f"{FINE}alerts: {{watchdogs: {{{name}: {{hold: 1m}}}}}}").alerts.watchdogs


def test_the_same_at_the_top_of_the_file() -> None:
    (sentence,) = said("name: x\nlaunch: {command: a}\nmail_user: ada@example.org\n")
    assert "name its receivers in alerts.receivers" in sentence
    for line, meant in (("queue: gpu", "launch.partition"), ("walltime: 2h", "launch.time")):
        (sentence,) = said(f"name: x\nlaunch: {{command: a}}\n{line}\n")
        assert sentence.endswith(f"did you mean {meant!r}?")


@pytest.mark.threat(
    "A value contains a second option, such as `gres: 'gpu:8 --x'`, and reaches an #SBATCH line.",
    "Every value has one strict form. ftsupervise refuses any other value before it writes a script.",
)
@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("mem: 1G\n  mem_per_cpu: 1G", "launch.mem_per_cpu: mem and mem_per_cpu exclude each other"),
        ("gpus_per_node: 8\n  gres: gpu:8", "launch.gres: gpus_per_node asks for the GPUs already"),
        ("nodes: 4\n  ntasks: 2", "launch.ntasks: fewer ranks than nodes (4)"),
        ("nodes: 2\n  tasks_per_node: 4\n  ntasks: 9", "more ranks than nodes and tasks_per_node have room for (8)"),
        ("spare_nodes: 1\n  ntasks: 9", "launch.ntasks: with spare_nodes, write tasks_per_node"),
        ("exclusive: true\n  sbatch: [--exclusive]", "launch.sbatch[0]: launch.exclusive says this already"),
        ("exclusive: always", "launch.exclusive: expected"),
        ("hint: nomultithreading", "launch.hint: expected"),
        ("gres: 'gpu:8 --x'", "launch.gres: expected generic resources of each node"),
        ("licenses: a b", "launch.licenses: expected licenses as sbatch --licenses takes them"),
    ],
)
def test_what_sbatch_would_refuse_or_read_otherwise_is_refused_before(lines: str, sentence: str) -> None:
    assert sentence in launch(lines)


@pytest.mark.parametrize("name", ["", "-x", ".x", "a b", "a\\nb", "é", "x" * 101, "a/b", "$(id)", "%j"])
def test_a_run_has_a_plain_name(name: str) -> None:
    (sentence,) = said(f'name: "{name}"\nlaunch: {{command: a}}\n')
    assert "name: expected letters, digits, '.', '_' and '-', at most 100 of them, a letter or digit first" in sentence


@pytest.mark.parametrize("command", ['""', '" \\n "', "[]", '[""]'])
def test_a_command_says_what_is_to_be_run(command: str) -> None:
    (sentence,) = said(f"name: x\nlaunch: {{command: {command}}}\n")
    assert "launch.command: empty; write the command" in sentence


def test_the_warning_comes_before_the_limit_and_the_error_points_at_it() -> None:
    assert said(f"{FINE}  time: 1h\n  warn: 2h\n") == [
        "ftsupervise.yaml:5:9: launch.warn: the warning must come later than the start: make warn shorter than time"
    ]


def test_a_misspelled_key_is_one_mistake_not_two() -> None:
    assert said("name: x\nlaunch:\n  comand: a\n") == [
        "ftsupervise.yaml:3:3: launch: unknown key 'comand'; did you mean 'command'?"
    ]


def test_what_is_missing_is_shown_as_it_is_written() -> None:
    assert said("{}") == [
        "ftsupervise.yaml:1:1: name: missing; add 'name: \"train-10b\"'",
        "ftsupervise.yaml:1:1: launch: missing; add 'launch: {command: \"python train.py\"}'",
    ]


def test_all_mistakes_are_told_in_the_order_of_the_file_and_each_once() -> None:
    lines = said(f"{FINE}  time: 20:00:00\n  nodes: x\njobs: 3\nguard: {{memory: 95}}\n")
    assert [line.split(" ")[0].removeprefix("ftsupervise.yaml:") for line in lines] == [
        "4:9:",
        "5:10:",
        "6:1:",
        "7:17:",
    ]
    assert "unknown key 'jobs'; it is known as launch.jobs" in lines[2]
    assert 'write the share with a percent sign: "95%"' in lines[3]


def test_a_hundred_mistakes_are_told_as_twenty() -> None:
    lines = said(FINE + "".join(f"key{n}: 1\n" for n in range(100)))
    assert len(lines) == 21
    assert lines[-1] == "... and 80 more"


@pytest.mark.parametrize("value", ["0%", "101%", "95", "0.95", "1"])
def test_a_share_has_a_percent_sign_and_lies_between_nothing_and_all(value: str) -> None:
    assert "guard.memory: " in said(f"{FINE}guard: {{memory: {value}}}")[0]


def test_a_secret_in_the_environment_of_the_job_is_refused_and_not_repeated() -> None:
    (sentence,) = said(f"{FINE}  env: {{HF_TOKEN: hunter2}}")
    assert 'a secret would stand in the job script; write launch.setup: export HF_TOKEN="$(cat' in sentence
    assert "hunter2" not in sentence


# ------------------------------------------------------- sections others write: nested models, lists, alternatives


class Disk(Strict):
    path: str
    free: Share | None = None


class Email(Strict):
    to: tuple[str, ...]
    password_file: str | None = None
    password_env: Annotated[str, Field(pattern="^[A-Z]+$")] | None = None


class Slack(Strict):
    channel: str
    token_env: str | None = None


class WithEmail(Strict):
    email: Email


class WithSlack(Strict):
    slack: Slack


def _kind(value: Any) -> str | None:
    return next(iter(value), None) if isinstance(value, dict) else None


class Stove(Strict):
    fuel: Literal["gas"]
    every: Duration


class Oven(Strict):
    fuel: Literal["wood"]
    logs: int


Receiver = Annotated[Annotated[WithEmail, Tag("email")] | Annotated[WithSlack, Tag("slack")], Discriminator(_kind)]


class House(Strict):
    disk: tuple[Disk, ...] = ()
    receivers: tuple[Receiver, ...] = ()
    loose: tuple[WithEmail | WithSlack, ...] = ()
    heat: tuple[Annotated[Stove | Oven, Field(discriminator="fuel")], ...] = ()
    groups: dict[str, tuple[Disk, ...]] = {}  # noqa: RUF012


def house(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validated(parse(text.encode(), "h.yaml"), House)
    return caught.value.message.splitlines()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("disk:\n- path: a\n- path: b\n  fre: 1", "h.yaml:4:3: disk[1]: unknown key 'fre'; did you mean 'free'?"),
        ("disk:\n- path: a\n  free: 5", 'h.yaml:3:9: disk[0].free: write the share with a percent sign: "5%", got 5'),
        ("disk:\n- free: 5%", "h.yaml:2:3: disk[0].path: missing; add 'path:' here"),
        (
            "disk: {path: a}",
            "h.yaml:1:7: disk: expected a list, got 'key: value' lines; put '- ' before the first key of each entry",
        ),
        ("disk: [a]", "h.yaml:1:8: disk[0]: expected 'key: value' lines, got 'a'"),
        ("groups: {x: [{path: a, fre: 1}]}", "h.yaml:1:24: groups.x[0]: unknown key 'fre'; did you mean 'free'?"),
        ("receivers:\n- email: {two: [a]}", "h.yaml:2:11: receivers[0].email: unknown key 'two'; did you mean 'to'?"),
        (
            "receivers:\n- email: {to: a}",
            "h.yaml:2:15: receivers[0].email.to: expected a list, got 'a'; type to: [\"a\"]",
        ),
        ("receivers:\n- emial: {to: [a]}", "h.yaml:2:3: receivers[0]: unknown key 'emial'; did you mean 'email'?"),
        ("receivers:\n- slack: {}", "h.yaml:2:3: receivers[0].slack.channel: missing; add 'channel:' here"),
        ("receivers: [5]", "h.yaml:1:13: receivers[0]: expected one of email, slack, got 5"),
        ("receivers: [email]", "h.yaml:1:13: receivers[0]: expected one of email, slack, got 'email'"),
        ("loose:\n- slack: {chanel: a}", "h.yaml:2:11: loose[0].slack: unknown key 'chanel'; did you mean 'channel'?"),
        ("heat: [{fuel: gass, every: 5m}]", "h.yaml:1:8: heat[0]: expected one of gas, wood; did you mean 'gas'?"),
        ("heat: [{fuel: gas, evry: 5m}]", "h.yaml:1:20: heat[0]: unknown key 'evry'; did you mean 'every'?"),
        ("heat: [{fuel: wood, logs: x}]", "h.yaml:1:27: heat[0].logs: expected a whole number, got 'x'"),
    ],
)
def test_sections_with_lists_and_alternatives_are_explained_as_readably(text: str, sentence: str) -> None:
    assert house(text) == [sentence]


@pytest.mark.parametrize("value", ["hunter2", '"${SMTP_PASSWORD}"', "'0123'", "5", "true"])
def test_a_secret_written_inline_is_answered_with_how_to_give_it_and_never_repeated(value: str) -> None:
    (sentence,) = house(f"receivers:\n- email: {{to: [a], password: {value}}}")
    variable = "SMTP_PASSWORD" if "$" in value else "VARIABLE"
    assert sentence == (
        "h.yaml:2:20: receivers[0].email: unknown key 'password'; a secret is never written in a settings file, "
        f"type 'password_file: PATH' or 'password_env: {variable}'"
    )


def test_a_secret_where_the_name_of_its_variable_belongs_is_not_repeated_either() -> None:
    (sentence,) = house("receivers:\n- email: {to: [a], password_env: hunter2!}")
    assert sentence.startswith("h.yaml:2:34: receivers[0].email.password_env: ")
    assert "hunter2" not in sentence


@pytest.mark.parametrize(
    "address", ["https://hooks.slack.com/services/T0/hunter2", "http://me:hunter2@host/x", "https://me:hunt@er2@host"]
)
def test_of_an_address_only_the_host_is_repeated(address: str) -> None:
    (sentence,) = said(f"name: x\nlaunch: {{command: a, partition: '{address}'}}")
    assert "hunt" not in sentence
    assert "/...'" in sentence


def test_a_model_can_point_at_the_key_below_it_that_is_to_be_mended() -> None:
    error = wrong_at(("a", 1), "mend this {one}")
    assert error.message() == "mend this {one}"
    assert error.context is not None
    assert error.context["at"] == ("a", 1)


@pytest.mark.parametrize("key", sorted(NO_SETTINGS_ANY_MORE))
def test_a_key_that_is_no_setting_any_more_says_what_is_done_in_its_place(key: str) -> None:
    *sections, name = key.split(".")
    text = f"{name}: 1"
    for section in reversed(sections[1:] if sections[0] == "launch" else sections):
        text = f"{section}: {{{text}}}"
    (sentence,) = said(f"{FINE}{'  ' if sections[0] == 'launch' else ''}{text}\n")
    assert (
        f"{'.'.join(sections)}: {name!r} is no setting any more: {NO_SETTINGS_ANY_MORE[key]}; leave it out" in sentence
    )
