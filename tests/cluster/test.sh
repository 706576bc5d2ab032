#!/usr/bin/env bash
# `make test-cluster`: boot the simulated cluster, copy checkout and images to its user, run
# tests/cluster, and take all down. It needs root on Debian 12. Arguments go to pytest.
# ORRERY_CLUSTER_KEEP=1 leaves the cluster up. Images stay in ORRERY_CLUSTER_IMAGES.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export ORRERY_CLUSTER_ROOT=${ORRERY_CLUSTER_ROOT:-/srv/orrery-cluster} ORRERY_CLUSTER_USER=${ORRERY_CLUSTER_USER:-orrery} ORRERY_TEST_CLUSTER=1
export ORRERY_CLUSTER_IMAGES=${ORRERY_CLUSTER_IMAGES:-/var/cache/orrery-test-cluster/images}
checkout=$ORRERY_CLUSTER_ROOT/users/$ORRERY_CLUSTER_USER/orrery
[ "$(id -u)" = 0 ] || { echo 'test-cluster: making namespaces and devices needs root; type: sudo make test-cluster' >&2; exit 1; }

# a container without privileges lacks this, and then nothing is tested
lacks() {
    . /etc/os-release
    [ "${ID:-} ${VERSION_ID:-}" = 'debian 12' ] || { echo "this is ${PRETTY_NAME:-another system}, and the cluster's packages are Debian 12's"; return; }
    [ -c /dev/fuse ] || { echo 'there is no /dev/fuse, through which images are mounted'; return; }
    unshare --mount --uts --ipc --net --pid --fork mount -t tmpfs tmpfs /mnt 2>/dev/null || { echo 'namespaces cannot be made'; return; }
    local device
    device=$(mktemp -u) && mknod "$device" c 1 3 2>/dev/null && rm "$device" || echo 'device nodes cannot be made'
}
not_run() { # WHY: in CI the other tests count; for a person it is an error
    echo "test-cluster: NOT RUN: $1" >&2
    [ -n "${CI:-}" ]
    exit
}
why=$(lacks)
[ -z "$why" ] || not_run "$why"

phase() { # NAME COMMAND...
    local began=$SECONDS code=0
    "${@:2}" || code=$?
    printf 'test-cluster: %-8s %4d s%s\n' "$1" $((SECONDS - began)) "$([ $code = 0 ] || echo "  failed ($code)")"
    return $code
}

images() {
    install -d -o "$ORRERY_CLUSTER_USER" "$ORRERY_CLUSTER_IMAGES"
    runuser -u "$ORRERY_CLUSTER_USER" -- env -C "$checkout" HOME="${checkout%/*}" USER="$ORRERY_CLUSTER_USER" \
        PATH="$checkout/.venv/bin:/usr/local/bin:/usr/bin:/bin" TMPDIR=/dev/shm \
        snakemake --snakefile pipelines/images.smk --cores all --config images="$ORRERY_CLUSTER_IMAGES" --quiet rules -- cpu
}

finish() { [ -n "${ORRERY_CLUSTER_KEEP:-}" ] || phase down bash tests/cluster/cluster.sh down; }
trap finish EXIT

phase install bash tests/cluster/cluster.sh install || not_run 'Slurm or Apptainer could not be installed (see above)'
phase up bash tests/cluster/cluster.sh up
phase copy bash tests/cluster/copy.sh
phase images images
# nodes that share two cores may be late, so failed tests run a second time
phase tests python -m pytest tests/cluster "$@" || phase 'again' python -m pytest tests/cluster --last-failed "$@"
