#!/usr/bin/env bash
# Measure rows of the trainer on a GPU host without network. A failed row does not stop the next.
#
#   LIMIT_S=280 OUT=/tmp/out bash benchmarks/trainer/session.sh "qwen3_0_6b_16k --peer" "qwen3_8b_8k --devices 4"
#
# Each argument is a row with options of rows.py. $OUT/rows.tar.gz gets every JSON and log. The six
# smallest traces (`--profile`) stand beside it. ../async/gpu_host.sh makes the site of packages;
# gpu_site.sh downloads torchtitan for `--peer`.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-/tmp/orrery-out} work=/tmp/orrery-rows site=${ORRERY_HOST_FOLDER:-/tmp/orrery-host}/site
mkdir -p "$out" "$work"
if [ -d .whl_titan ] && ! [ -d "$site/torchtitan" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl_titan/*.whl
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

number=0
for row in "$@"; do
  number=$((number + 1))
  folder=$work/$(printf '%02d' $number)_${row%% *}
  rm -rf "$folder" && mkdir -p "$folder"
  begin=$SECONDS
  # shellcheck disable=SC2086  # splits a row's options
  timeout -k 15 "${LIMIT_S:-280}" bash benchmarks/async/gpu_host.sh python benchmarks/trainer/rows.py $row --out "$folder" >"$folder/log" 2>&1
  code=$?
  echo "=== $row: code $code after $((SECONDS - begin)) s"
  if [ $code = 0 ]; then grep -vE '^\+ |Warning|warn' "$folder/log" | tail -n 48; else tail -n 25 "$folder/log" | cut -c1-400; fi
  tar -C "$work" --exclude='*.trace.json.gz' -czf "$out/rows.tar.gz" .
done
find "$work" -name '*.trace.json.gz' -size -15M -printf '%s %p\n' | sort -n | head -n 6 | while read -r _ trace; do
  cp "$trace" "$out/$(echo "${trace#"$work"/}" | tr '/' '_')"
done
ls -la "$out"
