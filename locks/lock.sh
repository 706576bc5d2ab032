#!/usr/bin/env bash
# Writes cpu.txt and uv.txt anew from cpu.in and uv.in. Run at the root of the checkout, by `make lock`, after `make setup`.
set -euo pipefail

version=$(<.python-version)
python=$(command -v python3)
source locks/sources.sh

compile() {
    uv pip compile --quiet --upgrade --generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
        --python-platform x86_64-manylinux_2_28 --python-version "$version" "$@"
}
compile "${from[@]}" --overrides locks/overrides.txt locks/cpu.in -o locks/cpu.txt
compile locks/uv.in -o locks/uv.txt
if grep -nE '^[^#]*(://|--find-links|--.*index-url)' locks/cpu.txt locks/uv.txt; then
    echo "lock failed: the lines above hold an address; a lock must not" >&2
    exit 1
fi
echo "lock: cpu.txt is part of every run's identity; now: make setup render"
