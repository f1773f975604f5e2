"""Why a job in the queue will never start by waiting: Slurm's reasons, as versions 22.05 to 26.05 have them. Pure.

The limits of an association and of a QOS follow one grammar, so that a resource which a site has added needs no line here:

    QOSMaxGRESPerJob, AssocMaxCpuPerJobLimit, QOSMaxMemoryPerNode   one job may not have that much: it never starts
    QOSMaxCpuMinutesPerJobLimit                                     nor for that long
    QOSMinGRES                                                      it must ask for more
    AssocGrpGRESMinutes, QOSGrpWallLimit                            a budget, and it is used up
    QOSMaxGRESPerUser, MaxCpuPerAccount, AssocGrpGRESRunMinutes     others' jobs have it: it starts when they have ended

Source: ``src/common/job_state_reason.c`` of Slurm, and squeue(1), JOB REASON CODES.
"""

from __future__ import annotations

import re

from ftsupervise.scheduler.parse import reason_word

_AGAIN = "and launch again"
# Slurm's reason, and the text that it writes in place of one as ``reason_word`` returns it -> its meaning, and what to do
NEVER = {
    "DependencyNeverSatisfied": ("it waits for a job that failed or is gone", "scancel it and launch again"),
    "JobHeldUser": ("its owner has put it on hold", "scontrol release JOBID"),
    "JobHeldAdmin": ("an administrator has put it on hold", "ask your administrator"),
    "JobHoldMaxRequeue": (
        "it was requeued too many times and is held",
        "find the failure, then scontrol release JOBID",
    ),
    "BadConstraints": ("no node has the features it asks for", f"correct launch.constraint {_AGAIN}"),
    "InvalidQOS": ("its QOS does not exist or is not yours", f"correct launch.qos {_AGAIN}"),
    "InvalidAccount": ("its account does not exist or is not yours", f"correct launch.account {_AGAIN}"),
    "AccountNotAllowed": ("its account may not use this partition", "correct launch.account or launch.partition"),
    "QOSNotAllowed": ("its QOS may not be used here", "correct launch.qos or launch.partition"),
    "PartitionNodeLimit": ("it asks for more nodes than the partition has", f"correct launch.nodes {_AGAIN}"),
    "PartitionTimeLimit": ("it asks for more time than the partition gives", f"correct launch.time {_AGAIN}"),
    "PartitionConfig": ("the partition does not take such a job", f"correct launch.partition {_AGAIN}"),
    "MaxMemPerLimit": ("it asks for more memory than the partition gives", f"correct launch.mem {_AGAIN}"),
    "ReservationDeleted": ("its reservation was deleted", f"correct launch.reservation {_AGAIN}"),
    "ReservationInvalid": ("its reservation cannot be used", f"correct launch.reservation {_AGAIN}"),
    "DeadLine": ("it cannot end before its deadline", f"correct --deadline {_AGAIN}"),
    "BurstBufferOperation": ("its burst buffer failed, and it is held", "scontrol show job JOBID says why"),
    "launch_failed_requeued_held": ("it could not be started and is held", "find out why, then scontrol release JOBID"),
    "launch_failure_limit_exceeded_requeued_held": (
        "it could not be started too many times and is held",
        "find out why, then scontrol release JOBID",
    ),
    "user_env_retrieval_failed_requeued_held": (
        "the environment of its user could not be loaded and it is held",
        "launch without --get-user-env, or scontrol release JOBID",
    ),
    "job_requeued_in_held_state": ("it was requeued and is held", "scontrol release JOBID"),
}
_BY_WORD = {reason.lower(): words for reason, words in NEVER.items()}
_OF_ONE_JOB = re.compile(r"(?P<whose>qos|assoc)max(?P<what>[a-z]+?)(?P<long>minutes)?per(job|node)(limit)?")
_TOO_LITTLE = re.compile(r"qosmin(?P<what>[a-z]+?)(notsatisfied)?")
_BUDGET = re.compile(r"(?P<whose>qos|assoc)grp(?P<what>[a-z]+?)(?<!run)minutes(limit)?|(?P<wall>qos|assoc)grpwalllimit")
_RESOURCES = {  # -> what it asks for, and the setting
    "cpu": ("CPUs", "launch.cpus_per_task"),
    "gres": ("GPUs or other gres", "launch.gpus_per_node"),
    "mem": ("memory", "launch.mem"),
    "memory": ("memory", "launch.mem"),
    "node": ("nodes", "launch.nodes"),
    "wallduration": ("time", "launch.time"),
    "license": ("licenses", "launch.licenses"),
}
_OTHER = ("of a resource", "launch")
_WHOSE = {"qos": "its QOS", "assoc": "its account"}


def never_starts(reason: str) -> tuple[str, str] | None:
    """Return why a job that waits for ``reason`` never starts by waiting, and what to do, with JOBID for its number.

    None where it may start, as one that waits for the end of a maintenance (PartitionDown) may.
    """
    alone = re.split("[,:]", reason, maxsplit=1)[0]  # nodes may stand behind it, or a plug-in's words
    word = reason_word(alone).lower()
    if word in _BY_WORD:
        return _BY_WORD[word]
    if found := _OF_ONE_JOB.fullmatch(word):
        what, setting = _RESOURCES.get(found["what"], _OTHER)
        long = ", for as long as it may run," if found["long"] else ""
        return f"it asks for more {what}{long} than {_WHOSE[found['whose']]} gives", f"correct {setting}"
    if found := _TOO_LITTLE.fullmatch(word):
        what, setting = _RESOURCES.get(found["what"], _OTHER)
        return f"it asks for less than its QOS demands ({what})", f"correct {setting} or launch.qos"
    if found := _BUDGET.fullmatch(word):
        whose = _WHOSE[found["whose"] or found["wall"]]
        return (
            f"the budget of {whose} is used up",
            "ask for more (sshare -l), or use another launch.account or launch.qos",
        )
    return None
