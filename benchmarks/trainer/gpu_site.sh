#!/usr/bin/env bash
# Download torchtitan and its dependencies without torch to .whl_titan/, for `--peer` rows on a
# GPU host without network (session.sh).
set -euo pipefail
cd "$(dirname "$0")/../.."

peer=(torchtitan==0.2.2 torchdata datasets dill multiprocess tyro docstring-parser typeguard tomli)
platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
for n in 39 38 35 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done

mkdir -p .whl_titan
for name in "${peer[@]}"; do
  python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" -d .whl_titan "$name"
done
du -sh .whl_titan
