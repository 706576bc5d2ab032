# One task of a Slurm step: bash task.sh ROLE FIRST_INDEX LOGS HEADER COMMAND...
# Its index is the step's first one and its rank; its devices go into the container; its log opens with what is run.
role=$1 first=$2 logs=$3 header=$4
shift 4
index=$((first + SLURM_PROCID))
[ -z "$CUDA_VISIBLE_DEVICES" ] || export APPTAINERENV_CUDA_VISIBLE_DEVICES="$CUDA_VISIBLE_DEVICES"
exec >>"$logs/$role.$index.log" 2>&1
echo "$header $* --index $index"
exec "$@" --index "$index"
