#!/usr/bin/env bash
# `make test-bare`: follow the README on a bare Debian 12. As root; about 25 minutes on two cores, so CI leaves it out.
# - debootstrap makes a root file system: Debian's minimum, git and make. It gets a clone of HEAD.
# - Then `make demo` and `make test` run there, as in the README. ARGS goes to `make test`.
# - This machine's settings for apt, pip and certificates apply. ORRERY_BARE_ROOT: a folder to keep.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() { echo "test-bare: $*" >&2; exit 1; }
[ "$(id -u)" -eq 0 ] || fail 'a root file system is made as root; type: sudo make test-bare'
command -v debootstrap >/dev/null || fail 'debootstrap is missing; type: apt-get install -y debootstrap'

root=${ORRERY_BARE_ROOT:-$(mktemp -d /var/tmp/orrery-bare.XXXXXX)}
mirror=$(awk '/^URIs:/ && !/security/ {print $2; exit} /^deb / && !/security/ {print $2; exit}' /etc/apt/sources.list.d/*.sources /etc/apt/sources.list 2>/dev/null)
mounted=()
finish() {
    for place in "${mounted[@]}"; do umount -l "$place"; done
    [ -n "${ORRERY_BARE_ROOT:-}" ] || rm -rf --one-file-system "$root"
}
trap finish EXIT
bind() { # SOURCE: the same place inside
    mkdir -p "$root$1"
    mount --rbind "$1" "$root$1"
    mount --make-rslave "$root$1"
    mounted=("$root$1" "${mounted[@]}")
}

[ -e "$root/etc/debian_version" ] || debootstrap --variant=minbase --include=git,make,ca-certificates bookworm "$root" "${mirror:-http://deb.debian.org/debian}"
for place in /proc /sys /dev; do bind "$place"; done
cp /etc/resolv.conf "$root/etc/"
cp /etc/apt/apt.conf.d/* "$root/etc/apt/apt.conf.d/" 2>/dev/null || true
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
[ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/"
for place in $(python3 -m pip config get global.find-links 2>/dev/null | tr ',' ' '); do [ ! -d "$place" ] || bind "$place"; done

rm -rf "$root/srv/orrery"
git clone --quiet . "$root/srv/orrery"
inside() { # COMMAND...
    local word kept=(PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM="${TERM:-dumb}")
    for word in $(compgen -e | grep -E '^(PIP_|UV_|SSL_|REQUESTS_|OPENBLAS_)'); do kept+=("$word=${!word}"); done
    chroot "$root" /usr/bin/env -i "${kept[@]}" bash -c 'cd /srv/orrery && "$@"' - "$@"
}
echo "test-bare: $(git rev-parse HEAD) on Debian $(<"$root/etc/debian_version")"
inside ${ORRERY_BARE_ONLY:-make demo}
[ -n "${ORRERY_BARE_ONLY:-}" ] || inside make test ARGS="${ARGS:-}"
