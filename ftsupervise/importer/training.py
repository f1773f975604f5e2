"""Looks at the script that trains: which framework runs its loop, whether the guard is in it, whether it can go on. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# The first one that its imports or words name: the framework, its page, what shows it, the lines of the guard.
_PLAIN = (
    "from ftsupervise import Guard",
    "guard = Guard()",
    "newest = guard.latest()                  # the checkpoint to load; None at the first start",
    "decision = guard.step(step)              # in the loop, at each step",
    "if decision.save or step % 1000 == 0:",
    "    with guard.checkpoint(step) as folder:",
    "        torch.save(state, folder / 'state.pt')",
    "if decision.stop:",
    "    break",
    "guard.finished(step)                     # behind the loop, when the training is complete",
)
_LIGHTNING = (
    "from ftsupervise.integrations.lightning import LightningGuard",
    "guard = LightningGuard(save_every=500)",
    "trainer = Trainer(callbacks=[guard])     # with your other arguments",
    "trainer.fit(model, loader, ckpt_path=guard.latest())",
)
_HUGGING_FACE = (
    "from ftsupervise.integrations.huggingface import HuggingFaceGuard",
    "guard = HuggingFaceGuard()",
    "trainer = Trainer(model, args, callbacks=[guard])     # with your other arguments",
    "trainer.train(resume_from_checkpoint=guard.latest())",
)
_ACCELERATE = (
    "from ftsupervise.integrations.accelerate import AccelerateGuard",
    "guard = AccelerateGuard(accelerator, save_every=500)",
    "for epoch in guard.epochs(EPOCHS):",
    "    for batch in guard.batches(loader):",
)
_FRAMEWORKS = (
    ("Lightning", "lightning", r"^\s*(?:import|from)\s+(?:pytorch_lightning|lightning)\b", _LIGHTNING),
    ("DeepSpeed", "deepspeed", r"^\s*import\s+deepspeed\b|\bdeepspeed\.initialize\b", _PLAIN),
    ("Megatron-LM", "megatron", r"^\s*from\s+megatron\b", _PLAIN),
    ("Accelerate", "accelerate", r"^\s*from\s+accelerate\s+import\b.*\bAccelerator\b", _ACCELERATE),
    (
        "Hugging Face's Trainer",
        "huggingface",
        r"\b(?:Seq2Seq|SFT|DPO)?Trainer\((?=[\s\S]*\btransformers\b)|^\s*from\s+transformers\s+import\b[^#\n]*\bTrainer\b",
        _HUGGING_FACE,
    ),
    ("FSDP", "ddp", r"\bfully_shard\b|FullyShardedDataParallel", _PLAIN),
    ("DDP", "ddp", r"DistributedDataParallel", _PLAIN),
    ("PyTorch", "pytorch", r"^\s*(?:import|from)\s+torch\b", _PLAIN),
    ("JAX", "jax", r"^\s*(?:import|from)\s+jax\b", _PLAIN),
    ("Keras", "", r"^\s*(?:import|from)\s+(?:keras|tensorflow)\b", _PLAIN),
)
_ALL = "docs/frameworks.md"
_LAUNCHERS = ("torch.", "accelerate.", "deepspeed.", "pip", "venv", "cProfile", "pdb", "debugpy", "ipykernel", "http.")
_ASSIGNED = re.compile(
    r"(?m)^[ \t]*(?:export[ \t]+|declare[ \t]+(?:-\w+[ \t]+)*)?([A-Za-z_]\w*)="
    r"(?:\"((?:[^\"\\]|\\[\s\S])*)\"|'([^']*)'|([^\s;&|()`\"']+))(?=[ \t]*(?:$|[;#]|&&))"
)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_NESTED = 5  # variables in variables
_LARGEST = 100_000  # characters
_RESUMES = re.compile(r"resume|restart|ckpt|checkpoint|init[_-]from|load[_-]from|continue", re.I)


@dataclass(frozen=True)
class Training:
    """``framework``: "" for none that is known. ``page``: of the manual, about its loop; ``lines``: those of the guard;
    ``text``: of the script.
    """

    path: str
    framework: str
    page: str
    guarded: bool
    lines: tuple[str, ...]
    text: str


def script_in(command: str) -> str:
    """Return the first Python file that the command names, as a file or as a module; "" where it names none."""
    if found := re.search(r"(?:^|[\s=\"'])((?:[\w.@+-]+/|/)*[\w.@+-]+\.py)(?=[\s\"';|&]|$)", command):
        return found[1]
    for module in re.findall(r"(?:^|\s)-m\s+([A-Za-z_][\w.]*)(?=[\s\"';|&]|$)", command):
        if not module.startswith(_LAUNCHERS):
            return f"{module.replace('.', '/')}.py"
    return ""


def spelled_out(command: str, before: str, known: Mapping[str, str]) -> str:
    """Return the command with the variables put in that are ``known``, or that the code ``before`` it sets to a plain text.
    What only a shell could say stays as it is.
    """
    values = dict(known)
    for name, quoted, single, plain in _ASSIGNED.findall(before):
        values[name] = quoted or single or plain
    for _ in range(_NESTED):
        before, command = command, _VARIABLE.sub(lambda found: values.get(found[1] or found[2], found[0]), command)
        if command == before or len(command) > _LARGEST:
            break
    return re.sub(r"(?:\$\(pwd\)|`pwd`)/", "", command.replace("\\\n", " "))


def look_at(path: str, text: str) -> Training:
    """Return what the text of the training script says."""
    for name, page, shows, lines in _FRAMEWORKS:
        if re.search(shows, text, re.M):
            where = f"docs/frameworks/{page}.md" if page else _ALL
            return Training(path, name, where, "ftsupervise" in text, lines, text)
    return Training(path, "", _ALL, "ftsupervise" in text, _PLAIN, text)


def told_to_resume(command: str) -> bool:
    """Return whether a word of the command sounds as if it said where to go on from."""
    return _RESUMES.search(command) is not None
