#!/usr/bin/env bash
# Puts the working tree (what git does not ignore, and .git) where the user of the simulated cluster has it, as that user's, with its site file and
# login environment. As root; again after every change. What the user made there (runs/, .venv) stays.
set -euo pipefail

root=${ORRERY_CLUSTER_ROOT:-/srv/orrery-cluster}
login=${ORRERY_CLUSTER_USER:-orrery}
images=${ORRERY_CLUSTER_IMAGES:-/var/cache/orrery-test-cluster/images}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$root/users/$login/orrery

as_user() { runuser -u "$login" -- env -C "$checkout" HOME="$root/users/$login" USER="$login" PATH=/usr/local/bin:/usr/bin:/bin "$@"; }

mkdir -p "$checkout"
rsync --archive --delete --filter=':- .gitignore' --exclude=/site.toml --chown="$login:$login" "$here/../../" "$checkout/"
sed "s|IMAGES|$images|" "$here/site.toml" >"$checkout/site.toml"
chown "$login:" "$checkout" "$checkout/site.toml"

# the cluster has no way out: what comes from the network comes here, outside of it
cat "$checkout"/locks/{install.sh,system.sh,login.txt,uv.txt} "$checkout"/packages/{manifest,runtime,observe,launcher}/pyproject.toml | sha256sum >"$root/login.sha256"
if ! cmp -s "$root/login.sha256" "$checkout/.venv/.login.sha256"; then
    as_user bash locks/install.sh login
    cp "$root/login.sha256" "$checkout/.venv/.login.sha256"
fi
