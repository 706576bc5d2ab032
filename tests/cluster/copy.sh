#!/usr/bin/env bash
# Copy the working tree (with .git, without ignored files) to the user of the simulated cluster, with
# its site file and login environment. Run it as root after every change. Files that the user made
# there (runs/, .venv) stay.
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

# The cluster has no way out, so downloads happen here, outside of it.
cat "$checkout"/locks/{install.sh,system.sh,login.txt,uv.txt} "$checkout"/pyproject.toml | sha256sum >"$root/login.sha256"
if ! cmp -s "$root/login.sha256" "$checkout/.venv/.login.sha256"; then
    as_user bash locks/install.sh login
    cp "$root/login.sha256" "$checkout/.venv/.login.sha256"
fi
