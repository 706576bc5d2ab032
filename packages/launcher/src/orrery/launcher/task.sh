# One task of a Slurm step: bash task.sh ROLE FIRST_INDEX LOGS SCRATCH HEADER COMMAND...
# Its index is the step's first one and its rank; its devices go into the container; its log opens with what is run.
role=$1 first=$2 logs=$3 scratch=$4 header=$5
shift 5
index=$((first + SLURM_PROCID))
[ -z "$CUDA_VISIBLE_DEVICES" ] || export APPTAINERENV_CUDA_VISIBLE_DEVICES="$CUDA_VISIBLE_DEVICES"
exec >>"$logs/$role.$index.log" 2>&1
echo "$header $* --index $index"
mkdir -p -m 700 "$scratch"
if [ ! -O "$scratch" ]; then
    echo "error: containers.scratch: $scratch on $(hostname) is not ours and cannot be made; name a folder that you may write to"
    exit 2
fi
exec "$@" --index "$index"
