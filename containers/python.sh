#!/usr/bin/env bash
# Install the packages of a lock into FOLDER as they stand below /usr/local in an image, with verified hashes.
#     python.sh LOCK FOLDER COMPILER      COMPILER: the image base-cuda, which compiles packages without a wheel
# uv, its cache and its package index are those of the host. The packages are for the image's Python.
set -euo pipefail
lock=$1 folder=$2 compiler=$3
cd "$(dirname "$0")/.."

version=$(<.python-version)
for python in $(type -ap "python$version" python3); do # a virtual environment may lack pip
    "$python" -m pip --version >/dev/null 2>&1 && break
done
source locks/sources.sh
[[ $lock != *.cuda.txt ]] || from=() UV_FIND_LINKS='' # torch's CUDA build is that of the default index

packages=$folder/lib/python$version/dist-packages
sdists=$(mktemp -d)
trap 'rm -rf "$sdists"' EXIT
split() { # the lock's blocks of the packages of sdists.in (1), or all others (0)
    awk -v wanted="$1" 'NR == FNR { if (/^[a-z]/) compiled[$1] = 1; next }
        /^[a-z]/ { split($1, name, "=="); take = (name[1] in compiled) == wanted } take' containers/sdists.in "$lock"
}
split 0 >"$sdists/wheels.txt"
split 1 >"$sdists/sources.txt"

install() { # LOCK OPTIONS
    uv pip install --quiet --target "$packages" --python "$BUILD_PYTHON" --python-version "$version" --python-platform x86_64-manylinux_2_36 \
        --link-mode copy --no-deps --require-hashes --only-binary :all: "${from[@]}" -r "$@"
}
install "$sdists/wheels.txt"
contested=$("$python" containers/contested.py "$packages")
for name in $contested; do # so that the last by name wins
    awk -v wanted="$name" '/^[a-z]/ { split($1, name, "=="); take = name[1] == wanted } take' "$sdists/wheels.txt" >"$sdists/one.txt"
    install "$sdists/one.txt" --reinstall
done

if grep -q '^[a-z]' "$sdists/sources.txt"; then
    kept() { # the archives of the lock that were fetched before
        sha256sum "$BUILD_CACHE"/*.tar.gz 2>/dev/null | while read -r sha256 file; do
            ! grep -q "$sha256" "$sdists/sources.txt" || printf '%s\0' "$file"
        done
    }
    [ "$(kept | tr -dc '\0' | wc -c)" = "$(grep -c '^[a-z]' "$sdists/sources.txt")" ] ||
        "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --require-hashes \
            -r "$sdists/sources.txt" -d "$BUILD_CACHE"
    kept | xargs -0 cp -t "$sdists"
    binds=$sdists:/sdists,$packages:/packages:ro,$PWD/containers/make_wheels.py:/make_wheels.py:ro
    apptainer --quiet exec --userns --contain --cleanenv --no-home --bind "$binds" \
        --env PYTHONPATH=/packages,CFLAGS=-g0,SOURCE_DATE_EPOCH=1700000000 --pwd /tmp "$compiler" python3 /make_wheels.py /sdists >"$sdists/log" 2>&1 ||
        { cat "$sdists/log" >&2; exit 1; }
    for wheel in "$sdists"/*.whl; do "$python" -m zipfile -e "$wheel" "$packages"; done
fi

# Scripts start with the host's Python: write the image's instead, and drop the scripts' digests from RECORD.
if [ -d "$packages/bin" ]; then
    find "$packages/bin" -type f -exec sed -i "1s|^#!.*python.*|#!/usr/bin/python$version|" {} +
    mv "$packages/bin" "$folder/bin"
fi
find "$packages" -path '*.dist-info/RECORD' -exec sed -i '/^\(\.\.\/\)*bin\//d' {} +
rm -f "$packages/.lock"
chmod -R u=rwX,go=rX "$folder"
