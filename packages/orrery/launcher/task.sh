# Run one task of a Slurm step: bash task.sh ROLE FIRST_INDEX DEVICES LOGS FOLDERS HEADER COMMAND...
# The process's index is FIRST_INDEX plus the task's rank. DEVICES is FIRST,COUNT: the task sees
# COUNT devices of its node, from device FIRST on. The log opens with HEADER and the command.
# FOLDERS, separated by colons, are made on the node, and only the user may enter them.
role=$1 first=$2 devices=$3 logs=$4 folders=$5 header=$6
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
IFS=: read -ra each <<<"$folders"
for folder in "${each[@]}"; do
    mkdir -p -m 700 "$folder"
    if [ -L "$folder" ] || [ ! -O "$folder" ]; then
        echo "error: containers.scratch: $folder on $(hostname) is a link or another user's folder, or cannot be made; name a folder that you may write to"
        exit 2
    fi
done
exec "$@" --index "$index"
