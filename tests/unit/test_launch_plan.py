"""What a launch would submit, from settings alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from click.testing import CliRunner

from ftsupervise.cli.run import run as run_command
from ftsupervise.config.schema import CheckpointSettings, HangSettings, Launch, ReplicaGroups, Restart, Run
from ftsupervise.config.supervisor import SETTINGS, Setting
from ftsupervise.errors import ConfigError, Refused
from ftsupervise.host.processes import START
from ftsupervise.launch.plan import SbatchOptions, plan, requeued, train_command, warning_lead, word
from ftsupervise.launch.script import render
from ftsupervise.launch.submit import check_queue
from ftsupervise.rundir.launches import LaunchRecord
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.scheduler.slurm import Slurm
from tests.neighbours.queue import Queue

JOBS = ReplicaGroups.model_validate_json('{"count": 3, "in": "jobs"}')
SLOW = Restart(hang=HangSettings(at_least=timedelta(seconds=40)))


def make(launch: dict[str, Any], **more: Any) -> Run:
    return Run(
        name="tr11",
        run_dir=Path("/scratch/runs/tr 11%"),
        launch=Launch(**{"command": "python train.py", **launch}),
        **more,
    )


def planned(
    launch: dict[str, Any], kind: str = "slurm", nodes: Any = None, settings: Any = MappingProxyType({}), **more: Any
) -> Any:
    return plan(
        make(launch, **settings, **({"nodes": nodes} if nodes else {})),
        kind=kind,
        token="t0",
        workdir=Path("/home/ada/tr11"),
        python="/venv/bin/python",
        **more,
    )


def as_words(options: SbatchOptions) -> list[str]:
    return [word(*one) for one in options.items()]


def test_the_default_is_an_array_of_ten_one_at_a_time() -> None:
    options = as_words(planned({"time": "20:00:00"}).link(0))
    assert "--array=1-10%1" in options
    assert "--signal=B:USR1@600" in options
    assert "--time=20:00:00" in options
    assert "--comment=ftsupervise:tr11:t0" in options
    assert "--no-requeue" in options
    assert not any(option.startswith("--dependency") for option in options)


@pytest.mark.parametrize(
    ("launch", "expedites", "option", "noted"),
    [
        ({}, True, "--requeue=expedite", "--requeue=expedite: a member that loses a node begins again at once"),
        ({"chain": "daisy"}, True, "--requeue=expedite", "--requeue=expedite: "),
        ({}, False, "--no-requeue", ""),
        ({}, None, "--no-requeue", "not asked yet; --requeue=expedite where scontrol show config offers it"),
        ({"spare_nodes": 1}, True, "--no-requeue", ""),
        ({"nodes": 4, "min_nodes": 2}, True, "--no-requeue", ""),
        ({"requeue": False}, True, "--no-requeue", ""),
        ({"requeue": True}, True, "--requeue", ""),
    ],
)
def test_a_job_that_a_lost_node_would_end_is_requeued_ahead_of_others_where_the_cluster_offers_it(
    launch: dict[str, Any], expedites: bool | None, option: str, noted: str
) -> None:
    settings = {"time": "1h", **launch}
    found = requeued(planned(settings), make(settings).launch, expedites=expedites)
    assert [one for one in as_words(found.link(0)) if "requeue" in one] == [option]
    notes = [note for note in found.notes if "requeue" in note]
    assert noted in "".join(notes) and bool(notes) is bool(noted)
    here = planned(settings, "local")
    assert requeued(here, make(settings).launch, expedites=expedites) == here


def test_the_keys_that_people_have_in_their_scripts_reach_sbatch() -> None:
    launch = {
        "nodes": 2,
        "ntasks": 3,
        "gres": "gpu:h100:8,nvme:1",
        "mem_per_cpu": "2G",
        "exclusive": True,
        "hint": "nomultithread",
        "licenses": "ansys:2",
        "error": "/logs/%x-%A_%a.err",
    }
    wanted = {
        "--ntasks=3",
        "--gres=gpu:h100:8,nvme:1",
        "--mem-per-cpu=2G",
        "--exclusive",
        "--hint=nomultithread",
        "--licenses=ansys:2",
        "--error=/logs/%x-%A_%a.err",
    }
    assert wanted <= set(as_words(planned(launch).options))
    assert "--exclusive=user" in as_words(planned({"exclusive": "user"}).options)
    assert "--mem-per-gpu=9G" in as_words(planned({"mem_per_gpu": "9G"}).options)
    assert not any(
        option.startswith(("--exclusive", "--error", "--ntasks")) for option in as_words(planned({}).options)
    )


def test_the_number_of_ranks_does_not_count_the_spare_nodes() -> None:
    one = planned({"nodes": 2, "spare_nodes": 1, "tasks_per_node": 2, "ntasks": 3})
    assert "--ntasks=3" in one.command and "--nodes=2" in one.command
    assert "--ntasks=3" not in as_words(one.options)


def test_a_percent_sign_in_the_run_directory_is_not_a_pattern_of_sbatch() -> None:
    assert "--output=/scratch/runs/tr 11%%/logs/%x-%A_%a.out" in as_words(planned({}).options)


def test_the_log_of_a_job_that_is_no_array_is_called_by_its_id_alone() -> None:
    assert "--output=/scratch/runs/tr 11%%/logs/%x-%j.out" in as_words(planned({"jobs": 1}).options)


def test_attaching_to_a_running_job_is_a_dependency() -> None:
    assert "--dependency=afterany:87" in as_words(planned({}, after="87").link(0))


def test_a_daisy_chain_hangs_each_job_on_the_one_before() -> None:
    chain = planned({"chain": "daisy", "jobs": 3}, after="87")
    assert chain.submissions == 3
    assert not any(option.startswith("--array") for option in as_words(chain.options))
    assert as_words(chain.link(0))[-1] == "--dependency=afterany:87"
    assert as_words(chain.link(1, "90"))[-1] == "--dependency=afterany:87:90", (
        "all before it: one of them may be cancelled"
    )


def test_a_plan_shows_each_link_of_a_daisy_chain_with_the_token_it_is_submitted_under() -> None:
    chain = planned({"chain": "daisy", "jobs": 2})
    marks = [[o for o in as_words(chain.link(index)) if o.startswith("--comment=")] for index in range(2)]
    assert marks == [["--comment=ftsupervise:tr11:t0.1"], ["--comment=ftsupervise:tr11:t0.2"]]
    assert [chain.token_of(index) for index in range(2)] == ["t0.1", "t0.2"]


def test_spare_nodes_are_never_in_an_array_because_no_kill_starts_two_members_at_once() -> None:
    spare = planned({"nodes": 4, "spare_nodes": 2})
    assert spare.chain == "daisy"
    assert {"--nodes=6", "--no-kill"} <= set(as_words(spare.options)) and "--nodes=6" in as_words(spare.link(0))
    assert "--nodes=4-6" in as_words(spare.link(1)), "a node may be lost: the next job does not wait for spare ones"
    assert "--nodes=4" in spare.command[spare.command.index("srun") :]
    assert any("--no-kill" in note for note in spare.notes)


@pytest.mark.parametrize(
    ("launch", "lead"),
    [({}, 600), ({"time": "20h"}, 600), ({"time": "10m"}, 300), ({"time": "10m", "warn": "2m"}, 120)],
)
def test_the_warning_comes_ten_minutes_before_the_limit_but_never_before_its_half(
    launch: dict[str, Any], lead: int
) -> None:
    assert warning_lead(make(launch).launch) == timedelta(seconds=lead)


def test_srun_is_put_before_the_command_on_slurm_and_not_on_this_machine() -> None:
    launch = make({"cpus_per_task": 8}).launch
    assert train_command(launch, "slurm") == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=8", "python", "train.py"]
    assert train_command(launch, "local") == ["python", "train.py"]


@pytest.mark.parametrize(
    ("warm", "words"),
    [("auto", ""), (None, " --warm off "), (("torch", "numpy.linalg"), " --warm torch,numpy.linalg ")],
)
def test_a_standby_is_the_default_and_can_be_left_out_or_told_what_to_import(warm: Any, words: str) -> None:
    text = " ".join(planned({"restart": {"warm": warm}}).command)
    assert words in text if words else "--warm" not in text


def test_an_own_srun_becomes_ours_with_its_options_behind_ours_and_is_refused_where_there_is_none() -> None:
    launch = make({"command": "srun -K0 python train.py"}).launch
    assert train_command(launch, "slurm") == ["srun", "--kill-on-bad-exit=1", "-K0", "python", "train.py"]
    with pytest.raises(ConfigError, match="starts with srun"):
        train_command(launch, "local")


def test_shell_in_a_command_gets_a_shell_that_survives_the_warning() -> None:
    words = train_command(make({"command": "python train.py --rank $SLURM_PROCID | tee log"}).launch, "local")
    assert words[:2] == ["bash", "-c"]
    assert words[2].startswith("set -o pipefail\ntrap : USR1")


@pytest.mark.parametrize("command", ["exec python train.py", "cd sub", "FOO=1 python train.py", "source env.sh"])
def test_what_only_a_shell_can_do_is_given_to_a_shell(command: str) -> None:
    assert train_command(make({"command": command}).launch, "local")[:2] == ["bash", "-c"]


def test_a_list_is_run_as_it_stands() -> None:
    assert train_command(make({"command": ("python", "a b.py", "$HOME")}).launch, "local") == [
        "python",
        "a b.py",
        "$HOME",
    ]


def test_a_container_stands_between_srun_and_the_command() -> None:
    words = train_command(make({"container": "apptainer exec --nv image.sif"}).launch, "slurm")
    assert words == ["srun", "--kill-on-bad-exit=1", "apptainer", "exec", "--nv", "image.sif", "python", "train.py"]


def test_a_run_without_a_time_limit_is_told_about_it() -> None:
    assert any("launch.time" in note for note in planned({}).notes)


def test_without_slurm_there_is_no_partition_whose_limit_could_apply() -> None:
    assert not any("launch.time" in note for note in planned({}, "local").notes)


def test_a_control_character_never_reaches_a_script() -> None:
    one = planned({})
    with pytest.raises(ConfigError, match="control characters"):
        render(one, make({}).launch, {**one.link(0), "job-name": "a\ntouch /tmp/canary"})


def test_a_misspelt_name_in_an_own_template_is_an_error(tmp_path: Path) -> None:
    own = tmp_path / "mine.j2"
    own.write_text("#!/bin/bash\n{{ comand }}\n")
    run = make({"template": own})
    with pytest.raises(ConfigError, match="comand"):
        render(planned({}), run.launch, planned({}).link(0))


def test_an_own_template_is_used(tmp_path: Path) -> None:
    own = tmp_path / "mine.j2"
    own.write_text(
        "#!/bin/sh\n{% for o in options %}#SBATCH {{ o | sbatch }}\n{% endfor %}exec {{ command | map('quote') | join(' ') }}\n"
    )
    script = render(planned({}), make({"template": own}).launch, {"job-name": "x", "comment": "ours"})
    assert script.startswith(
        f"#!/bin/sh\n#SBATCH --job-name=x\n#SBATCH --comment=ours\nexec /venv/bin/python -I {START} run"
    )


@pytest.mark.parametrize("off", [None, False, "off"])
def test_what_people_write_to_switch_something_off_does_so(off: Any) -> None:
    words = " ".join(planned({"command": "python t.py", "restart": {"hang": off, "warm": off}}).command)
    assert "--hang off" in words and "--warm off" in words


@pytest.mark.parametrize(
    ("restart", "nodes"),
    [
        ({"hang": {"at_least": "2d", "start": "30d", "unknown": "1ms"}}, {}),
        ({"hang": {"at_least": "1ms"}, "back_off": "0s", "stop_within": "1ms"}, {"at_most": 0}),
        ({"in_place": 100_000, "same_failure": 0, "budgets": {"node": 1000}}, {"at_most": 100_000}),
        ({"stop_within": "400d"}, {"health": {"command": "true", "timeout": "10ms", "when": ("failure",)}}),
    ],
)
def test_whatever_the_settings_take_the_ring_in_the_job_takes(restart: Any, nodes: Any) -> None:
    """What is refused there burns the chain, a member after the other."""
    words = list(planned({"command": "python t.py", "restart": restart}, nodes=nodes).command)
    run_command.make_context("run", words[words.index("run") + 1 :])


@pytest.mark.parametrize(
    ("launch", "noted"),
    [
        ({}, False),
        ({"command": "srun python t.py"}, False),
        ({"command": "srun python t.py", "srun": False}, True),
        ({"command": "srun python t.py | tee log"}, True),
        ({"command": "srun --nodes=2 python t.py"}, False),
        ({"command": "srun -n 16 python t.py"}, False),
        ({"command": "bash run.sh", "srun": False}, True),
        ({"command": "srun --nodelist=$FTSUPERVISE_NODES python t.py", "srun": False}, False),
    ],
)
def test_who_would_take_the_spare_nodes_for_work_is_told(launch: Any, noted: bool) -> None:
    notes = planned({"nodes": 2, "spare_nodes": 1, "tasks_per_node": 8, **launch}).notes
    assert any("may take the spare ones too; its srun needs --nodes=2 --ntasks=16" in note for note in notes) == noted


def test_tasks_that_the_person_counts_are_not_counted_again() -> None:
    launch = {"nodes": 2, "spare_nodes": 1, "srun_options": ("--ntasks-per-node=8",)}
    words = "srun --kill-on-bad-exit=1 --ntasks-per-node=8 --nodes=2 python train.py"
    assert " ".join(planned(launch).command).endswith(words)


@pytest.mark.parametrize("own", ["-K0", "--kill-on-bad-exit=0"])
def test_srun_ends_with_a_dead_rank_whatever_options_are_given_but_its_own_word_on_that(own: str) -> None:
    assert "srun --kill-on-bad-exit=1 --mpi=pmix python" in " ".join(planned({"srun_options": ("--mpi=pmix",)}).command)
    assert f"srun {own} python" in " ".join(planned({"srun_options": (own,)}).command)


@pytest.mark.parametrize("setting", [one for one in SETTINGS if one.off is not None], ids=lambda one: one.flag)
def test_every_setting_that_null_switches_off_is_taken_by_the_supervisor_as_launch_writes_it(setting: Setting) -> None:
    assert setting.off is not None
    context = run_command.make_context("run", [setting.flag, setting.off, "--", "true"])
    assert context.params["command"] == ("true",)


def test_replica_groups_are_one_job_with_a_node_for_each_and_the_spare_ones() -> None:
    found = planned(
        {
            "replica_groups": ReplicaGroups.model_validate({"count": 4, "nodes_each": 2}),
            "spare_nodes": 1,
            "tasks_per_node": 8,
        }
    )
    assert {"--nodes=9", "--no-kill", "--ntasks-per-node=8"} <= set(as_words(found.options))
    assert found.chain == "daisy", "--no-kill and an array's %1 start two members at once"
    words = list(found.command)
    each = words[words.index("groups") :]
    assert each[:2] == ["groups", "run"] and each[-6:] == [
        "srun",
        "--kill-on-bad-exit=1",
        "--nodes=2",
        "--ntasks=16",
        "python",
        "train.py",
    ]
    assert "--hang" in words[: words.index("groups")] and "--hang" not in each, (
        "the bound follows from the groups' timeouts"
    )
    asked = planned({"replica_groups": ReplicaGroups.model_validate({"count": 4}), "restart": SLOW}).command
    assert asked[asked.index("groups") :][-1] == "train.py" and list(asked).count("--hang") == 2


def test_a_run_in_a_place_where_a_replica_group_would_lie_is_refused() -> None:
    """It would obey the switches of the folder two levels above it, and write its checkpoints there."""
    settings = make({}).model_copy(update={"run_dir": Path("/scratch/groups/g100")})
    with pytest.raises(ConfigError, match="it would obey the switches there"):
        plan(settings, kind="slurm", token="t0", workdir=Path("/w"), python="/venv/bin/python")
    done = CliRunner().invoke(run_command, ["--run-dir", "/scratch/groups/g100", "--", "true"])
    assert "it would obey the switches there" in str(done.exception)


def test_groups_with_jobs_of_their_own_have_a_chain_each_and_a_small_one_for_all() -> None:
    found = planned({"replica_groups": JOBS, "gpus_per_node": 8, "mem": "500G", "jobs": 5})
    assert found.submissions == 4
    small, group = as_words(found.link(0)), as_words(found.link(3, "90"))
    assert {"--nodes=1", "--ntasks=1", "--mem=2G", "--array=1-5%1"} <= set(small)
    assert not any("gpus" in option for option in small) and "--gpus-per-node=8" in group
    assert not any(option.startswith("--dependency") for option in group), "no group waits for another one"
    command = found.part(3).command
    assert command[command.index("--number") + 1] == "2" and command[command.index("groups") + 1] == "member"
    assert len({next(o for o in as_words(found.link(n)) if o.startswith("--comment=")) for n in range(4)}) == 4
    with pytest.raises(ConfigError, match="cannot have spare nodes yet"):
        planned({"replica_groups": JOBS, "spare_nodes": 1})
    with pytest.raises(ConfigError, match="needs Slurm"):
        planned({"replica_groups": JOBS}, kind="local")


def test_a_launch_of_groups_that_broke_off_is_ended_before_another_one(tmp_path: Path) -> None:
    """Its groups run or wait already: to submit the rest of it would start a second copy of each."""
    comments = {"88_1": "ftsupervise:tr11:t0.1", "89_1": "ftsupervise:tr11:t0.2"}
    queue = Queue(tmp_path, [], {one: {"excluded": [], "comment": text} for one, text in comments.items()})
    run = RunDir(tmp_path / "run")
    page = run.launches / "0001" / "launch.json"
    page.parent.mkdir(parents=True)
    write_json(page, LaunchRecord(1, token="t0", scheduler="slurm", chain="groups", members=5, job_ids=("88",)))
    again = replace(planned({"replica_groups": JOBS}), run_dir=run.root)
    with pytest.raises(Refused) as error:
        check_queue(again, Slurm(env=queue.env), again=False)
    assert error.value.hint == "that launch broke off after 2 of its chains: scancel 88 89; then launch again"


@pytest.mark.parametrize(
    "launch",
    [{}, {"replica_groups": ReplicaGroups.model_validate({"count": 4}), "restart": SLOW}],
    ids=["one", "groups"],
)
def test_the_supervisor_of_a_run_is_told_that_checkpoints_are_retained_and_that_of_a_group_is_not(launch: Any) -> None:
    asks = CheckpointSettings.model_validate_json('{"retain": {"last": 5}}')
    words = planned(launch, settings={"checkpoints": asks}).command
    assert words.count("--retain") == 1
    assert words[words.index("--retain") + 1] == "on"
    assert words.index("--retain") < words.index("--")
    assert "--retain" not in planned(launch).command
