# Tell uv where packages are. Sourced by install.sh and lock.sh. uv uses pip's settings on this machine. Without a find-links
# folder, torch's CPU build comes from PyTorch's index. Sets `from` and exports UV_*. Needs `python`.
pip_says() { "$python" -m pip config get "global.$1" 2>/dev/null || true; }

from=()
find_links=${PIP_FIND_LINKS:-$(pip_says find-links)}
if [ -z "${UV_FIND_LINKS:-}" ] && [ -n "$find_links" ]; then
    UV_FIND_LINKS=$(printf '%s' "$find_links" | tr -s '[:space:]' ',')
    export UV_FIND_LINKS="${UV_FIND_LINKS%,}"
fi
[ -n "${UV_FIND_LINKS:-}" ] || from=(--torch-backend cpu)

index=${PIP_INDEX_URL:-$(pip_says index-url)}
[ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
cert=${PIP_CERT:-$(pip_says cert)}
[ -z "$cert" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}"
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}"
