#!/usr/bin/env bash
# Install missing Debian packages (locks/system.sh), make .venv from a lock with checked hashes, and
# install packages/ as the editable package `orrery`. Run at the root of the checkout:
#   bash locks/install.sh         everything: from cuda.txt where an NVIDIA driver answers, else from cpu.txt (`make setup`)
#   bash locks/install.sh cuda    from cuda.txt, also where there is no driver (`make setup HARDWARE=cuda`); cpu likewise
#   bash locks/install.sh login   what submits and watches runs on a cluster, from login.txt: no torch, no vLLM
# .venv/hardware contains cpu or cuda. Errors say what to do.
set -euo pipefail

NEEDS_DRIVER=580.65.06 # CUDA 13.0's, for Linux

say() { printf '\033[1m%s\033[0m\n' "setup: $*"; }
fail() { printf 'setup failed: %s\n' "$*" >&2; exit 1; }
driver() { # print the version of the NVIDIA driver, or nothing where none answers
    local said=
    said=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || said=
    # A container may have the devices without nvidia-smi.
    [ -n "$said" ] || [ ! -e /dev/nvidiactl ] || said=$(cat /proc/driver/nvidia/version 2>/dev/null) || said=
    [[ $said =~ [0-9]{3,}\.[0-9.]+ ]] && echo "${BASH_REMATCH[0]}" || true
}

asked=${1:-} is=$(cat .venv/hardware 2>/dev/null || true) found=$(driver)
case ${asked:-$is} in
    cpu | cuda | login) lock=${asked:-$is} ;;
    '') [ -n "$found" ] && lock=cuda || lock=cpu ;;
    *) fail "HARDWARE=$asked: choose cpu or cuda, or leave it out" ;;
esac
if [ "$lock" = login ]; then
    needs_mb=600 again='bash locks/install.sh login' modules='snakemake, _gojsonnet, orrery.launcher.cli'
else
    [ "$lock" = cpu ] && other=cuda needs_mb=4000 || other=cpu needs_mb=11000
    again="make setup${asked:+ HARDWARE=$asked}" modules='torch, vllm, snakemake, _gojsonnet, orrery.manifest.schema'
    why="no NVIDIA driver answers (\`nvidia-smi\`)"
    [ -z "$found" ] || why="NVIDIA driver $found"
    [ -z "$is" ] || why=".venv is for $is already"
    [ -z "$asked" ] || why="asked for"
    say "hardware $lock: $why; for $other type: make setup HARDWARE=$other"
fi
if [ "$lock" = cuda ] && [ -z "$found" ]; then
    say "no NVIDIA driver answers here; everything installs, and a GPU run needs a driver of version $NEEDS_DRIVER or newer"
elif [ "$lock" = cuda ] && [ "$(printf '%s\n' "$NEEDS_DRIVER" "$found" | sort -V | head -n 1)" != "$NEEDS_DRIVER" ]; then
    fail "the NVIDIA driver is $found, and CUDA 13 needs $NEEDS_DRIVER or newer; install one and type again: $again, or without GPUs: make setup HARDWARE=cpu"
fi
version=$(<.python-version)
if [ "$lock" = cuda ]; then # cuda.txt is also for 3.12, used if only that runs here
    for also in "$version" 3.12; do "python$also" -c '' 2>/dev/null && version=$also && break; done
fi
uv_version=$(sed -n 's/^uv==\([0-9.]*\).*/\1/p' locks/uv.txt)

[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || fail "$(uname -s) $(uname -m): the lock is for Linux on x86_64"
had=$([ ! -x .venv/bin/python ] || echo "${is:-cpu}") # a .venv without this file is for CPUs
[ "$lock" != login ] || had=${had:+login}             # both locks contain login's packages
free_kib=$(df -Pk . | awk 'NR == 2 {print $4}')
[ "$had" = "$lock" ] || [ "$free_kib" -gt "${needs_mb}000" ] ||
    fail "$((free_kib / 1000)) MB are free here; the environment needs about $needs_mb MB"

bash locks/system.sh "$lock"
python=$(command -v "python$version" || command -v python3) || fail "python3 is missing; install it, then type again: $again"

# The installer: the pinned uv, wherever it is; else from pip, beside the checkout and not in the system.
uv=
for candidate in .tools/bin/uv uv; do
    if [ "$("$candidate" --version 2>/dev/null | cut -d' ' -f2)" = "$uv_version" ]; then uv=$candidate; break; fi
done
if [ -z "$uv" ]; then
    say "uv $uv_version into .tools"
    if "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m pip install --quiet --disable-pip-version-check --root-user-action ignore --upgrade --target .tools --require-hashes -r locks/uv.txt ||
            fail "pip could not install uv; check the network (or pip's index), then type again: $again"
        uv=.tools/bin/uv
    elif command -v uv >/dev/null; then
        uv=uv
    else
        fail "pip is missing, and so is uv $uv_version; run: apt-get install -y python3-pip"
    fi
fi

uv=$(realpath "$(command -v "$uv")") # .venv/bin/uv, which may be the one found, goes with an old .venv

source locks/sources.sh
[ "$lock" != cuda ] || from=() UV_FIND_LINKS='' # the default index has torch's CUDA build

if [ "$had" != "$lock" ] || [ "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" != "$version" ]; then
    say "Python $version in .venv${had:+; that of $had is replaced}"
    "$uv" venv --quiet --clear --python "$version" .venv ||
        fail "no Python $version was found or could be fetched; run: apt-get install -y python$version"
fi
[ "$lock" = login ] || echo "$lock" >.venv/hardware

say "packages of locks/$lock.txt ($(grep -c '^[a-z].*==' "locks/$lock.txt")), whose bytecode then takes up to a minute"
"$uv" pip install --python .venv/bin/python --no-deps --require-hashes --compile-bytecode "${from[@]}" -r "locks/$lock.txt" || {
    df -Ph . "$("$uv" cache dir)" >&2 || true
    fail "see uv's message above, and the free space of this folder and of uv's cache; what was fetched is kept, so after mending it type again: $again"
}

say "the package orrery, editable"
"$uv" pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --offline --editable . ||
    fail "the package does not build; see uv's message above"

ln -sf "$uv" .venv/bin/uv # docs/quickstart.md types it once .venv is active

.venv/bin/python -c "import $modules" ||
    fail "the packages do not import; remove .venv and type again: $again"
say "done; the command is .venv/bin/orrery"
