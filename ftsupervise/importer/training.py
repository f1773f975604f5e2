"""Looks at the script that trains: which framework runs its loop, whether the guard is in it, whether it can go on. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

# The first one that its imports or words name. (framework, what shows it, the lines of the guard)
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
    ("Lightning", r"^\s*(?:import|from)\s+(?:pytorch_lightning|lightning)\b", _LIGHTNING),
    ("DeepSpeed", r"^\s*import\s+deepspeed\b|\bdeepspeed\.initialize\b", _PLAIN),
    ("Megatron-LM", r"^\s*from\s+megatron\b", _PLAIN),
    ("Accelerate", r"^\s*from\s+accelerate\s+import\b.*\bAccelerator\b", _ACCELERATE),
    (
        "Hugging Face's Trainer",
        r"\b(?:Seq2Seq|SFT|DPO)?Trainer\((?=[\s\S]*\btransformers\b)|^\s*from\s+transformers\s+import\b[^#\n]*\bTrainer\b",
        _HUGGING_FACE,
    ),
    ("FSDP", r"\bfully_shard\b|FullyShardedDataParallel", _PLAIN),
    ("DDP", r"DistributedDataParallel", _PLAIN),
    ("PyTorch", r"^\s*(?:import|from)\s+torch\b", _PLAIN),
    ("JAX", r"^\s*(?:import|from)\s+jax\b", _PLAIN),
    ("Keras", r"^\s*(?:import|from)\s+(?:keras|tensorflow)\b", _PLAIN),
)
_RESUMES = re.compile(r"resume|restart|ckpt|checkpoint|init[_-]from|load[_-]from|continue", re.I)


@dataclass(frozen=True)
class Training:
    """``framework``: "" for none that is known. ``lines``: those of the guard; ``text``: of the script."""

    path: str
    framework: str
    guarded: bool
    lines: tuple[str, ...]
    text: str


def script_in(command: str) -> str:
    """Return the first Python file that the command names; "" where it names none."""
    found = re.search(r"(?:^|[\s=\"'])((?:[\w.@+-]+/|/)*[\w.@+-]+\.py)(?=[\s\"';|&]|$)", command)
    return found[1] if found else ""


def look_at(path: str, text: str) -> Training:
    """Return what the text of the training script says."""
    for name, shows, lines in _FRAMEWORKS:
        if re.search(shows, text, re.M):
            return Training(path, name, "ftsupervise" in text, lines, text)
    return Training(path, "", "ftsupervise" in text, _PLAIN, text)


def told_to_resume(command: str) -> bool:
    """Return whether a word of the command sounds as if it said where to go on from."""
    return _RESUMES.search(command) is not None
