#!/usr/bin/env bash
# `make test`: all tests, in parts that run three at a time, the longest first.
# ALSO='test-cluster test-kernels' adds these verbs of the Makefile as parts. The reports are in .pytest_cache/parts. In CI up to three failed tests of a part run a second time, alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

reports=.pytest_cache/parts
rm -rf "$reports" && mkdir -p "$reports"
parts=(trainer launcher small_runs inference end_to_end rest tasks manifest models wire orchestrator elastic kernels observe runtime)
where() { # PART: its tests
    case $1 in
    small_runs) echo tests/test_small_runs_end_to_end.py ;;
    end_to_end) echo tests/test_end_to_end.py ;;
    rest)
        local part others=()
        for part in "${parts[@]}"; do [ "$part" = rest ] || others+=("--ignore=$(where "$part")"); done
        echo tests "${others[@]}" ;;
    *) echo "tests/$1" ;;
    esac
}

one() { # PART: run it; its report ends with `code N`
    local code=0 cache=$reports/$1 failed
    case " ${ALSO:-} " in
    *" $1 "*) make --no-print-directory "$1" ARGS='-v --durations=10' || code=$? ;;
    *)
        pytest $(where "$1") -v --durations=10 -o cache_dir="$cache" || code=$?
        # A process that ended in another way than with failed tests (a signal, an internal error) gets no second try.
        if [ "$code" = 1 ] && [ -n "${CI:-}" ]; then
            failed=$(python -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$cache/v/cache/lastfailed")
            if [ -n "$failed" ] && [ "$(wc -l <<<"$failed")" -le 3 ]; then
                printf 'SECOND TRY, alone, of the failed tests above:\n%s\n' "$failed"
                code=0
                pytest $(where "$1") -v --last-failed --last-failed-no-failures none -o cache_dir="$cache" || code=$?
            fi
        fi ;;
    esac
    echo "code $code"
}

begin=$SECONDS
declare -A running=() began=()
finished() { # wait for a part, and print its line
    local ended part
    wait -n -p ended "${!running[@]}" || true
    part=${running[$ended]}
    unset "running[$ended]"
    printf '%-14s %5d s  %s\n' "$part" $((SECONDS - began[$part])) "$(grep -E '^=+ .* in [0-9.]+s' "$reports/$part.log" | tail -n 1 | tr -d '=')"
    [ "$(tail -n 1 "$reports/$part.log")" = 'code 0' ] || failed+=("$part")
}
failed=()
stop() { for process in "${!running[@]}"; do kill -- "-$process" 2>/dev/null || true; done; }
trap stop EXIT
trap 'exit 130' INT TERM
unset PYTHONDONTWRITEBYTECODE # else a thousand processes compile the packages
export TORCHINDUCTOR_COMPILE_THREADS=1 # the other core is taken, and each worker would import torch
set -m # each part is a process group, so that an interrupt ends its children
# Parts wait for a third of their time, so three keep two cores busy. The cluster counts twice: it
# comes first, beside parts of one process, and its tests have deadlines.
places() { # PART...: the number of places that they take
    local part count=$#
    for part; do [ "$part" != test-cluster ] || count=$((count + 1)); done
    echo "$count"
}
for part in ${ALSO:-} "${parts[@]}"; do
    while [ "$(places "${running[@]}" "$part")" -gt 3 ]; do finished; done
    one "$part" >"$reports/$part.log" 2>&1 </dev/null &
    running[$!]=$part began[$part]=$SECONDS
done
while [ ${#running[@]} -gt 0 ]; do finished; done

for part in "${failed[@]}"; do
    printf '\n--- the report of %s\n' "$part"
    tail -n 400 "$reports/$part.log"
done
passed=$(grep -hoE '[0-9]+ passed' "$reports"/*.log | awk '{sum += $1} END {print sum + 0}')
echo "test: ${#parts[@]} parts in $((SECONDS - begin)) s, $passed tests passed"
[ ${#failed[@]} -eq 0 ] || { echo "test: failed in ${failed[*]}; the reports are in $reports; again: make test ARGS='--last-failed -o cache_dir=$reports/${failed[0]}'" >&2; exit 1; }
