# Run one task of a Slurm step: bash task.sh ROLE FIRST_INDEX DEVICES LOGS SCRATCH HEADER COMMAND...
# The process's index is FIRST_INDEX plus the task's rank. DEVICES is FIRST,COUNT: the task sees
# COUNT devices of its node, from device FIRST on. The log opens with HEADER and the command.
role=$1 first=$2 devices=$3 logs=$4 scratch=$5 header=$6
shift 6
index=$((first + SLURM_PROCID))
exec >>"$logs/$role.$index.log" 2>&1
echo "$header $* --index $index"
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra all <<<"$CUDA_VISIBLE_DEVICES"
    IFS=, read -r from count <<<"$devices"
    some=("${all[@]:from:count}")
    CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${some[*]}")
    export CUDA_VISIBLE_DEVICES APPTAINERENV_CUDA_VISIBLE_DEVICES="$CUDA_VISIBLE_DEVICES"
fi
mkdir -p -m 700 "$scratch"
if [ ! -O "$scratch" ]; then
    echo "error: containers.scratch: $scratch on $(hostname) is not ours and cannot be made; name a folder that you may write to"
    exit 2
fi
exec "$@" --index "$index"
