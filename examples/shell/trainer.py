"""A trainer that knows nothing of ftsupervise: it reads a model, makes some steps, prints them, and writes a model.

It fits the line behind noisy points by gradient descent. Which points a step sees follows from its number alone, so the weights
are the same bits in however many pieces they were trained.
"""

import argparse
import os
import random
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--from", dest="old", default="", help="a model; none: begin with zeros")
parser.add_argument("--to", dest="new", required=True)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--step-time", type=float, default=float(os.environ.get("STEP_TIME", "0.02")))
args = parser.parse_args()

step, weights = 0, [0.0, 0.0]
if args.old:
    first, *rest = Path(args.old).read_text().split()
    step, weights = int(first), [float.fromhex(word) for word in rest]

for _ in range(args.steps):
    step += 1
    draw = random.Random(step)
    points = [(x, 3.0 * x - 1.0 + draw.gauss(0.0, 0.1)) for x in (draw.random() for _ in range(32))]
    errors = [(x, weights[0] * x + weights[1] - y) for x, y in points]
    weights[0] -= 0.1 * sum(error * x for x, error in errors) / len(errors)
    weights[1] -= 0.1 * sum(error for _, error in errors) / len(errors)
    print(f"step {step} loss {sum(error * error for _, error in errors) / len(errors):.4f}", flush=True)
    time.sleep(args.step_time)

with Path(args.new).open("w") as file:
    file.write("\n".join([str(step), *(weight.hex() for weight in weights)]) + "\n")
    file.flush()
    os.fsync(file.fileno())
