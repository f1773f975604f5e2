"""Ten thousand flipped bits over all layouts of a checkpoint: never is the one loaded or named whose byte has changed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ftsupervise import Guard

# The files of one checkpoint as each program lays them out; the state is bytes here, for nothing of it is unpickled.
LAYOUTS = {
    "guard.save": (),
    "guard.checkpoint": ("weights", "sub/optimizer"),
    "DCP": ("__0_0.distcp", "__1_0.distcp", ".metadata"),
    "Lightning": ("lightning.ckpt",),
    "Hugging Face": ("model.safetensors", "optimizer.pt", "trainer_state.json"),
    "DeepSpeed": ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "Megatron": ("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flips", [30, pytest.param(1430, marks=pytest.mark.slow)])
def test_no_flipped_bit_of_any_layout_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, flips: int
) -> None:
    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(tmp_path / "ckpt"))
    draw, state = random.Random(layout), {"weights": bytearray(3000), "step": 0}
    with Guard(signals=(), rank=0, world=1) as guard:
        guard.restore(state=state)
        for step in (1, 2):
            state.update(weights=bytearray(draw.randbytes(3000)), step=step)
            if layout == "guard.save":
                guard.save(step)
                continue
            with guard.checkpoint(step) as folder:
                for name in LAYOUTS[layout]:
                    (folder / name).parent.mkdir(exist_ok=True)
                    (folder / name).write_bytes(draw.randbytes(2000))
    newest = tmp_path / "ckpt" / "step-00000002"
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    for _ in range(flips):
        path = draw.choice(files)
        whole = path.read_bytes()
        changed = bytearray(whole)
        changed[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        assert begins_at(layout) == 1, path
        path.write_bytes(whole)
    assert begins_at(layout) == 2, "as it was"


def begins_at(layout: str) -> int | None:
    with Guard(signals=(), rank=0, world=1) as guard:
        if layout != "guard.save":
            found = guard.latest()
            return None if found is None else int(found.name[-8:])
        state: dict[str, Any] = {"weights": bytearray(3000), "step": 0}
        step = guard.restore(state=state)
        assert state["step"] == step
        return step
