"""A training script that knows nothing of us, and saves and loads as Hugging Face's Trainer does, file after file.

Its loader takes the highest number, as ``get_last_checkpoint`` does, and crashes on what is not whole. Where the file
``deaths`` names places in a save, one on each line, an attempt kills itself (SIGKILL) at the first of them, in its second save.
"""

SCRIPT = """
import json, os, re, signal, struct, sys, time, zipfile
from pathlib import Path

EVERY, LAST = 5, STEPS
out, deaths = Path("out"), Path("deaths")
out.mkdir(exist_ok=True)


def newest():
    found = [(int(m[1]), path) for path in out.iterdir() if (m := re.fullmatch("checkpoint-(\\\\d+)", path.name))]
    return max(found, default=(0, None))


def load(path):
    if not (path / "model.safetensors").is_file():
        raise ValueError(f"Can't find a valid checkpoint at {path}")
    raw = (path / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    assert len(raw) == 8 + size + json.loads(raw[8 : 8 + size])["w"]["data_offsets"][1], "incomplete metadata"
    zipfile.ZipFile(path / "optimizer.pt").testzip()
    return json.loads((path / "trainer_state.json").read_text())["global_step"]


def at(place, folder):
    if saves == 2 and deaths.exists() and (left := deaths.read_text().split()) and left[0] == place:
        deaths.write_text("\\n".join(left[1:]))
        os.kill(os.getpid(), signal.SIGKILL)


def save(step):
    folder = out / f"checkpoint-{step}"
    folder.mkdir()
    at("folder", folder)
    (folder / "config.json").write_text("{}")
    at("config", folder)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    with (folder / "model.safetensors").open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(header)) + header[:10])
        at("header", folder)
        file.write(header[10:] + bytes(2000))
        at("weights", folder)
        file.write(bytes(2000))
    at("model", folder)
    with zipfile.ZipFile(folder / "optimizer.pt", "w") as archive:
        archive.writestr("optimizer/data.pkl", bytes(9000))
        archive.fp.flush()
        at("optimizer", folder)
    (folder / "training_args.bin").write_bytes(b"args")
    at("args", folder)
    with (folder / "trainer_state.json").open("w") as file:
        file.write('{"global_step": ')
        file.flush()
        at("state", folder)
        file.write(f"{step}" + chr(125))
    at("end", folder)


begun, path = newest()
begun, saves = load(path) if path else 0, 0
print(f"begins behind {begun}", flush=True)
for step in range(begun, LAST + 1):
    print(f"iter {step}: loss {4 - step / 1000:.4f}, time 80.12ms", flush=True)
    time.sleep(0.05)
    if step and step % EVERY == 0 and step > begun:
        saves += 1
        save(step)
"""
CUT = ("folder", "config", "header", "weights", "model", "optimizer", "args", "state")  # the last of all is "end"


def trainer(steps: int) -> str:
    return SCRIPT.replace("STEPS", str(steps))
