#!/usr/bin/env bash
# Write the locks: `bash locks/lock.sh` all (`make lock`), `bash locks/lock.sh login trainer.cpu` these two. With --keep before the names,
# locked versions stay if the lists allow them.
# Run at the root of the checkout, after `make setup`. The locks of login and of the CPU images use the versions of cpu.txt,
# the locks of the GPU images use the versions of cuda.txt.
set -euo pipefail

upgrade=(--upgrade)
if [ "${1:-}" = --keep ]; then
    upgrade=()
    shift
fi
names=("$@")
[ $# -gt 0 ] || names=(uv cpu login orchestrator trainer.cpu inference.cpu cuda inference.cuda trainer.cuda)

version=$(<.python-version)
python=$(command -v python3)
source locks/sources.sh

compile() { # NAME, then further options of uv
    local name=$1
    shift
    uv pip compile --quiet "${upgrade[@]}" --generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
        --python-platform x86_64-manylinux_2_28 --python-version "$version" "$@" "locks/$name.in" -o "locks/$name.txt"
    if grep -nE '^[^#]*(://|--find-links|--.*index-url)' "locks/$name.txt"; then
        echo "lock failed: the lines above of locks/$name.txt hold an address; a lock must not" >&2
        exit 1
    fi
}

for name in "${names[@]}"; do
    case $name in
        uv) compile uv ;;
        cpu) compile cpu "${from[@]}" --overrides locks/overrides.txt ;;
        login | orchestrator | *.cpu) compile "$name" "${from[@]}" --overrides locks/overrides.txt --constraints locks/cpu.txt ;;
        # The default index has torch's CUDA build. Orchestrator and login node run on both kinds of machines.
        cuda) UV_FIND_LINKS='' compile cuda --overrides <(grep '^ll' locks/overrides.txt) --constraints locks/orchestrator.txt --constraints locks/login.txt ;;
        *.cuda) UV_FIND_LINKS='' compile "$name" --constraints locks/cuda.txt ;;
        *) echo "lock failed: there is no locks/$name.in" >&2 && exit 2 ;;
    esac
done
[[ ! " ${names[*]} " =~ \ (cpu|cuda)\  ]] || echo "lock: these locks are part of runs' identity; now: make setup render"
