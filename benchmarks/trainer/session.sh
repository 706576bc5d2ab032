#!/usr/bin/env bash
# Rows of the trainer on a GPU host without network, one after the other; one that fails or takes too long does not stop the next.
#
#   LIMIT_S=280 OUT=/tmp/out bash benchmarks/trainer/session.sh "qwen3_0_6b_16k --peer" "qwen3_8b_8k --devices 4 --peer"
#
# Each argument is a row and options of rows.py. Out: $OUT/rows.tar.gz with every JSON and log, and the smallest six traces beside it
# (`--profile`). Wheels: gpu_site.sh, gpu_site.sh flash and gpu_site.sh peer, run where there is a network.
set -uo pipefail
shopt -s nullglob # a folder of wheels that was not fetched is none
cd "$(dirname "$0")/../.."
out=${OUT:-/tmp/orrery-out} work=/tmp/orrery-rows
mkdir -p "$out" "$work"
if ! [ -d /tmp/site ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site {.whl,.whl_flash,.whl_titan}/*.whl
fi
PYTHONPATH=/tmp/site:/tmp/site/nvidia_cutlass_dsl/dsl_packages:$(printf '%s:' "$PWD"/packages/*/src)
export PYTHONPATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

number=0
for row in "$@"; do
  number=$((number + 1))
  folder=$work/$(printf '%02d' $number)_${row%% *}
  rm -rf "$folder" && mkdir -p "$folder"
  begin=$SECONDS
  # shellcheck disable=SC2086  # a row's options are words
  timeout -k 15 "${LIMIT_S:-280}" python3 benchmarks/trainer/rows.py $row --out "$folder" >"$folder/log" 2>&1
  code=$?
  echo "=== $row: code $code after $((SECONDS - begin)) s"
  if [ $code = 0 ]; then grep -vE '^\+ |Warning|warn' "$folder/log" | tail -n 48; else tail -n 25 "$folder/log" | cut -c1-400; fi
  tar -C "$work" --exclude='*.trace.json.gz' -czf "$out/rows.tar.gz" .
done
find "$work" -name '*.trace.json.gz' -size -15M -printf '%s %p\n' | sort -n | head -n 6 | while read -r _ trace; do
  cp "$trace" "$out/$(echo "${trace#"$work"/}" | tr '/' '_')"
done
ls -la "$out"
