#!/usr/bin/env bash
# Install Apptainer on Debian, as root, if it is missing.
# Debian 12 has no package. This installs the one of Debian's unstable suite and checks its sha256. With
# a glibc older than 2.38 it retargets the few symbols of 2.38 (retarget_glibc.py) and packs it again.
set -euo pipefail

version=1.4.5-2
sha256=26cf96e08fccb0e50ea0f285a5a19f940ee873d167a0680584fe6eba7d197d65
here=$(cd "$(dirname "$0")" && pwd)

fail() { printf 'install_apptainer: %s\n' "$*" >&2; exit 1; }

# FUSE mounts images for ordinary users; some machines give the device to root alone.
open_fuse() { [ ! -c /dev/fuse ] || [ "$(stat -c %a /dev/fuse)" = 666 ] || chmod 666 /dev/fuse; }

if command -v apptainer >/dev/null; then
    [ "$(id -u)" != 0 ] || open_fuse
    exit 0
fi
[ "$(id -u)" = 0 ] || fail "apptainer is missing, and only root can install it; run: sudo bash $0"
command -v apt-get >/dev/null || fail "apptainer is missing and this is not Debian; see apptainer.org for this system's package"
[ "$(dpkg --print-architecture)" = amd64 ] || fail "the package is for amd64, this machine is $(dpkg --print-architecture)"

mirror=${DEBIAN_MIRROR:-$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p' /etc/apt/sources.list.d/*.sources 2>/dev/null | head -n 1)}
mirror=${mirror:-http://deb.debian.org/debian}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

curl -fsS --retry 3 --max-time 300 "$mirror/pool/main/a/apptainer/apptainer_${version}_amd64.deb" -o "$work/apptainer.deb" ||
    fail "could not fetch Apptainer $version from $mirror; set DEBIAN_MIRROR to one that has it"
echo "$sha256  $work/apptainer.deb" | sha256sum --check --quiet || fail "the package of $mirror is not the one that this script knows"

if dpkg --compare-versions "$(dpkg-query -W -f '${Version}' libc6)" lt 2.38; then
    dpkg-deb -R "$work/apptainer.deb" "$work/tree"
    python3 "$here/retarget_glibc.py" "$work/tree/usr/bin/apptainer" "$work"/tree/usr/lib/x86_64-linux-gnu/apptainer/{bin/starter,lib/offsetpreload.so}
    sed -i -e 's/^Version: .*/&~oldglibc/' -e 's/libc6 (>= 2.38)/libc6/' "$work/tree/DEBIAN/control"
    (cd "$work/tree" && find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum >DEBIAN/md5sums)
    dpkg-deb -Zgzip -z1 --root-owner-group -b "$work/tree" "$work/apptainer.deb" >/dev/null
fi

chmod 755 "$work" # apt reads the package as its own user
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$work/apptainer.deb" squashfuse fuse2fs >"$work/apt.log" 2>&1 ||
    fail "apt-get failed: $(tail -n 5 "$work/apt.log")"
open_fuse
apptainer --version
