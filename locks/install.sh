#!/usr/bin/env bash
# Install missing Debian packages (locks/system.sh), make .venv from a lock with checked hashes, and
# install packages/ as the editable package `orrery`. Run at the root of the checkout:
#   bash locks/install.sh         everything, from cpu.txt (`make setup` runs this)
#   bash locks/install.sh login   what submits and watches runs on a cluster, from login.txt: no torch, no vLLM
# Whatever fails says what to do.
set -euo pipefail

say() { printf '\033[1m%s\033[0m\n' "setup: $*"; }
fail() { printf 'setup failed: %s\n' "$*" >&2; exit 1; }

case ${1:-cpu} in
    cpu) lock=cpu needs_mb=4000 again='make setup' modules='torch, vllm, snakemake, _gojsonnet, orrery.manifest.schema' ;;
    login)
        lock=login needs_mb=600 again='bash locks/install.sh login'
        modules='snakemake, _gojsonnet, orrery.launcher.cli'
        ;;
    *) fail "there is no environment '$1'; there are cpu and login" ;;
esac
version=$(<.python-version)
uv_version=$(sed -n 's/^uv==\([0-9.]*\).*/\1/p' locks/uv.txt)

[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || fail "$(uname -s) $(uname -m): the lock is for Linux on x86_64"
free_kib=$(df -Pk . | awk 'NR == 2 {print $4}')
[ -d .venv ] || [ "$free_kib" -gt "${needs_mb}000" ] || fail "$((free_kib / 1000)) MB are free here; the environment needs about $needs_mb MB"

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

if [ "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" != "$version" ]; then
    say "Python $version in .venv"
    "$uv" venv --quiet --clear --python "$version" .venv ||
        fail "no Python $version was found or could be fetched; run: apt-get install -y python$version"
fi

say "packages of locks/$lock.txt ($(grep -c '^[a-z].*==' "locks/$lock.txt"))"
"$uv" pip install --python .venv/bin/python --no-deps --require-hashes --compile-bytecode "${from[@]}" -r "locks/$lock.txt" ||
    fail "see uv's message above; what was fetched is kept, so after mending it type again: $again"

say "the package orrery, editable"
"$uv" pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --offline --editable . ||
    fail "the package does not build; see uv's message above"

ln -sf "$uv" .venv/bin/uv # docs/quickstart.md types it once .venv is active

.venv/bin/python -c "import $modules" ||
    fail "the packages do not import; remove .venv and type again: $again"
say "done; the command is .venv/bin/orrery"
