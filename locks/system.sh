#!/usr/bin/env bash
# Install the Debian packages that the Python packages need. Run at the root of the checkout:
#   bash locks/system.sh cpu      what `make demo` and `make test` need (locks/install.sh calls this); cuda is the same
#   bash locks/system.sh login    what a login node needs
#   bash locks/system.sh elastic  etcd for elastic runs, into .tools and without root
#   bash locks/system.sh nix      Nix for tests/test_nix.py (`make nix`)
# It installs them as root or if sudo asks for no password. Otherwise it prints the command to type.
set -euo pipefail

fail() { printf 'setup failed: %s\n' "$*" >&2; exit 1; }

missing=()
program() { command -v "$1" >/dev/null || missing+=("$2"); }                      # PROGRAM PACKAGE
library() { [[ $libraries == *$'\t'"$1 "* ]] || missing+=("$2"); }                 # FILE PACKAGE
version=$(<.python-version)
libraries=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)
python=$(command -v "python$version" || command -v python3 || true)

case ${1:-cpu} in
    cpu | cuda | login)
        [ -n "$python" ] || missing+=(python3)
        # uv comes from pip; a machine with the pinned uv needs no pip.
        uv_version=$(sed -n 's/^uv==\([0-9.]*\).*/\1/p' locks/uv.txt)
        [ "$(uv --version 2>/dev/null | cut -d' ' -f2)" = "$uv_version" ] || [ -x .tools/bin/uv ] ||
            "${python:-false}" -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
        ;;&
    cpu | cuda)
        # Some packages of the lock have no wheel and are compiled; torch.compile calls g++ while a run trains.
        program g++ g++
        "${python:-false}" -c 'import os, sysconfig; os.stat(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null || missing+=(python3-dev)
        library libnuma.so.1 libnuma1       # vLLM's
        library libibverbs.so.1 libibverbs1 # Mooncake's, also over TCP
        library libcurl.so.4 libcurl4       # Mooncake's
        ;;
    login) ;;
    elastic) # not installed, because the package starts a service; apt checks the hash
        etcd=.tools/etcd/usr/bin/etcd
        ! command -v etcd >/dev/null && [ ! -x $etcd ] || exit 0
        command -v apt-get dpkg-deb >/dev/null ||
            fail "this system has no etcd and no apt-get; put etcd 3.4 or newer on the PATH, then type the same command again"
        [ "$(apt-cache policy etcd-server 2>/dev/null | grep -c Candidate)" = 1 ] || [ "$(id -u)" -ne 0 ] || apt-get update -qq
        new=.tools/etcd.new && rm -rf $new && mkdir -p $new
        (cd $new && apt-get download -qq -o APT::Sandbox::User=root etcd-server) ||
            fail "apt-get could not download etcd-server; type: apt-get update, then the same command again"
        dpkg-deb -x $new/etcd-server_*.deb $new/etcd
        rm -rf .tools/etcd && mv $new/etcd .tools/etcd && rm -rf $new
        exit 0
        ;;
    nix) program nix nix-bin ;;
    *) fail "there is no list of packages '$1'; there are cpu, cuda, login, elastic and nix" ;;
esac
[ ${#missing[@]} -gt 0 ] || exit 0

install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}")
typed="apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
command -v apt-get >/dev/null ||
    fail "the system lacks ${missing[*]} (Debian's names) and has no apt-get; install them, then type the same command again"
if [ "$(id -u)" -eq 0 ]; then
    root=()
elif sudo -n true 2>/dev/null; then
    root=(sudo -n)
else
    fail "the system lacks ${missing[*]}; type: sudo sh -c '$typed'"
fi
printf '\033[1m%s\033[0m\n' "setup: Debian packages ${missing[*]}"
{ "${root[@]}" apt-get update -qq -o Acquire::Retries=3 && "${root[@]}" "${install[@]}" -qq -o Acquire::Retries=3 >/dev/null; } ||
    fail "apt-get could not install them; its message is above. When it is mended, type the same command again, or: $typed"
