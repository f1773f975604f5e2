#!/bin/bash
# Trains in pieces of some steps with a trainer that knows nothing of ftsupervise. The lines marked RUN are all that it needs.
set -eu
steps=${1:-400} piece=${2:-20}
here=$(dirname "$0")

run=${FTSUPERVISE_RUN_DIR:-}                                                     # RUN
attempt=${FTSUPERVISE_ATTEMPT_DIR:-}                                             # RUN
saved=${FTSUPERVISE_CHECKPOINT_DIR:-checkpoints}                                 # RUN
trap : USR1                     # the job ends soon: the trainer ends its piece   # RUN
asked_to_leave() {                                                               # RUN
    [ -e "$run/switches/kill-switch" ] ||        # somebody has raised it        # RUN
        [ -e "$attempt/warning" ] ||             # Slurm has warned              # RUN
        [ -f "${FTSUPERVISE_STAGING_AREA:-}" ]   # a newer attempt has begun     # RUN
}                                                                                # RUN

mkdir -p "$saved"
while :; do
    model=$(find "$saved" -name 'step-*.model' | sort | tail -n 1)
    wanted=$(test -e "$run/switches/save-switch" && echo yes || true)            # RUN
    "${PYTHON:-python3}" "$here/trainer.py" --from "$model" --steps "$piece" --to "$saved/.new"
    if [ -f "${FTSUPERVISE_STAGING_AREA:-}" ]; then exit 0; fi  # it is the newer one's to save   # RUN
    step=$(head -n 1 "$saved/.new")
    mv "$saved/.new" "$saved/$(printf 'step-%08d.model' "$step")"
    if [ "$wanted" ]; then rm -f "$run/switches/save-switch"; fi  # it is answered   # RUN
    if [ "$step" -ge "$steps" ]; then
        echo "finished at step $step, weights $(sha256sum < "$saved/$(printf 'step-%08d.model' "$step")" | cut -c 1-16)"
        if [ "$run" ]; then touch "$run/state/finished"; fi                      # RUN
        exit 0
    fi
    if asked_to_leave; then echo "leaving at step $step"; exit 0; fi             # RUN
done
