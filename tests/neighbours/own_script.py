"""A training script that knows nothing of us, shaped like nanoGPT's: what it prints, where it saves, how it resumes."""

# iterations that are made before it dies with an exit code of its own, as often as the file ``deaths`` says
SCRIPT = """
import os, sys, time
from pathlib import Path

out_dir, init_from, max_iters, eval_interval = "out", "scratch", {iterations}, 20
for word in sys.argv[1:]:
    key, _, value = word.removeprefix("--").partition("=")
    globals()[key] = value
Path(out_dir).mkdir(exist_ok=True)
ckpt = Path(out_dir) / "ckpt.pt"
iter_num = 0
print(f"tokens per iteration will be: 491,520")
if init_from == "resume":
    print(f"Resuming training from {{out_dir}}")
    iter_num = int(ckpt.read_text().split()[0])
print("number of parameters: 10.65M")
begun = iter_num
while True:
    if iter_num % eval_interval == 0:
        print(f"step {{iter_num}}: train loss 4.1{{iter_num % 7}}, val loss 4.2", flush=True)
        if iter_num > begun:
            print(f"saving checkpoint to {{out_dir}}")
            ckpt.write_text(f"{{iter_num}} by process {{os.getpid()}}")
    print(f"iter {{iter_num}}: loss {{4 - iter_num / 1000:.4f}}, time 80.12ms, mfu 12.34%", flush=True)
    iter_num += 1
    if iter_num > max_iters:
        break
    deaths = int(Path("deaths").read_text())
    if iter_num - begun > 45 and deaths:
        Path("deaths").write_text(str(deaths - 1))
        sys.exit(10 + deaths)
    time.sleep(0.08)
"""


def nano(iterations: int) -> str:
    return SCRIPT.format(iterations=iterations)
