#!/usr/bin/env bash
# What of the trainer only GPUs can run, each with a verdict of its own, in one call on a GPU host without network: one GPU does, two do more.
#
#   OUT=/tmp/out LIMIT_S=570 bash benchmarks/trainer/first_run.sh
#   OUT=/tmp/out ONLY='bench_|flight' bash benchmarks/trainer/first_run.sh   # those whose name it matches
#   OUT=/tmp/out DRY=1 bash benchmarks/trainer/first_run.sh        # on any machine: that every command starts
#
# Out: $OUT/verdicts.txt, a line each (passes, fails, too long, nothing ran, no time left), and all that was said in $OUT/first_run.tar.gz.
# A check whose tests were all skipped has shown nothing, and says so. Wheels: gpu_site.sh, run where there is a network.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-/tmp/orrery-first} limit=${LIMIT_S:-570} dry=${DRY:-} work=/tmp/orrery-first-run
rm -rf "$work" && mkdir -p "$out" "$work"
: >"$out/verdicts.txt"
if compgen -G '.whl/*.whl' >/dev/null && ! [ -d /tmp/site ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
fi
PYTHONPATH=/tmp/site:$(printf '%s:' "$PWD"/packages/*/src)
export PYTHONPATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
ranks=$((gpus >= 2 ? 2 : 1))
# Not the project's settings of pytest: they name plugins that a GPU host lacks.
tests=(python3 -m pytest -c /dev/null --rootdir . --import-mode=importlib -p no:cacheprovider -q -rs --timeout 280)
bench=(python3 -m orrery.trainer.bench)
if [ -n "$dry" ]; then
  tests+=(--collect-only)
  shape=(reverse_text_moe --device cpu --tokens-per-micro-batch 32 --document-tokens 16 --steps 1 --warmup 1)
  saved=(--gigabytes 0.02 --ranks 1)
else
  shape=(qwen3_30b_a3b_16k --layers 4 --steps 2 --warmup 2 --loss sft)
  saved=(--gigabytes 16 --ranks "$ranks" --folder "$work")
fi

# check NAME SECONDS COMMAND…: its verdict; a command that takes longer is ended.
check() {
  local name=$1 most=$2 begin=$SECONDS code verdict last
  shift 2
  [[ $name =~ ${ONLY:-.} ]] || return 0
  local left=$((limit - SECONDS))
  if [ $left -lt 20 ]; then verdict="no time left" last=""
  else
    timeout -k 10 $((most < left ? most : left)) "$@" >"$work/$name.log" 2>&1
    code=$?
    last=$(grep -vE '^\s*$|Warning:|warnings\.warn' "$work/$name.log" | tail -n 1 | cut -c1-200)
    if [ $code = 124 ] || [ $code = 137 ]; then verdict="too long"
    elif [[ "$*" == *pytest* ]] && { [ $code = 5 ] || { [ $code = 0 ] && [ -z "$dry" ] && ! [[ "$last" =~ [0-9]+\ passed ]]; }; }; then verdict="nothing ran"
    elif [ $code = 0 ]; then verdict="passes"
    else
      verdict="fails"
      last=$(grep -E '^(error: |E  |FAILED|ERROR)' "$work/$name.log" | head -n 3 | tr '\n' ' ' | cut -c1-400)
    fi
  fi
  printf '%-12s %-34s %4d s  %s\n' "$verdict" "$name" $((SECONDS - begin)) "$last" | tee -a "$out/verdicts.txt"
  tar -C "$work" -czf "$out/first_run.tar.gz" .
}

t=packages/trainer/tests
check kernels 150 "${tests[@]}" packages/kernels/tests
check optimizers_same_bits 60 "${tests[@]}" "$t/test_trainer_optim.py" -k same_bits
check layouts_over_nccl 200 "${tests[@]}" "$t/test_trainer_gpu.py" -k layout
check state_in_host_memory 60 "${tests[@]}" "$t/test_trainer_gpu.py" -k state
check resume_at_other_meshes 60 "${tests[@]}" "$t/test_trainer_gpu.py" -k checkpoint
check flight_recorder 90 "${tests[@]}" packages/launcher/tests/test_launcher_ranks.py -k h200
check checkpoint_from_gpus 100 python3 benchmarks/trainer/checkpoint.py "${saved[@]}" --output "$work/checkpoint.json"

# In real shapes, a lever at a time.
for one in \
  'cpu_offload --fsdp {"cpu_offload":true}' \
  'optimizer_offload --memory {"optimizer_offload":true}' \
  'activation_offload --memory {"activation_checkpointing":{"kind":"full"},"activation_offload":true}' \
  'muon --trainer {"optimizer":{"kind":"muon","lr":1e-6,"momentum":0.95,"nesterov":true,"weight_decay":0.0,"num_newton_schulz_steps":5,"rest":{"kind":"adamw","lr":1e-6,"beta1":0.9,"beta2":0.95,"eps":1e-8,"weight_decay":0.0}}}' \
  'ep --mesh {"ep":2}' \
  'ring --mesh {"cp":2,"cp_style":"ring"}' \
  'ep_activation_offload --mesh {"ep":2} --memory {"activation_checkpointing":{"kind":"full"},"activation_offload":true}'; do
  read -ra words <<<"$one"
  if [[ "$one" == *--mesh* ]] && [ $ranks -lt 2 ] && [ -z "$dry" ]; then
    printf '%-12s %-34s %4d s  takes two GPUs\n' "nothing ran" "bench_${words[0]}" 0 | tee -a "$out/verdicts.txt"
    continue
  fi
  [ -n "$dry" ] && number=2 || number=$ranks
  check "bench_${words[0]}" 240 "${bench[@]}" "${shape[@]}" --devices $number "${words[@]:1}" --json "$work/bench_${words[0]}.json"
done
echo "$(grep -c '^passes' "$out/verdicts.txt") of $(wc -l <"$out/verdicts.txt") pass, on $gpus GPUs, in $SECONDS s"
! grep -qE '^(fails|too long)' "$out/verdicts.txt"
