# Build the images that roles run in, unless an image of the same recipe exists:
#     snakemake -s pipelines/images.smk --cores all cpu        (or: cuda; one image: trainer_cpu)
#     snakemake -s pipelines/images.smk --cores all lock_cpu   (the same, then writes containers/images.lock)
# TMPDIR names the folder to work in (a memory file system is much faster). --config images=FOLDER names the folder for the images.
import sys

from orrery.launcher.containers import IMAGES, record_path
from orrery.manifest.identity import find_workspace

WORKSPACE = find_workspace()
FOLDER = Path(config.get("images", "images"))
RECORDS = {
    (image, hardware): str(record_path(WORKSPACE, FOLDER, image, hardware))
    for hardware in ("cpu", "cuda")
    for image in IMAGES
}


for hardware in ("cpu", "cuda"):

    rule:
        name:
            hardware
        input:
            [RECORDS[image, hardware] for image in IMAGES],

    rule:
        name:
            f"lock_{hardware}"
        input:
            [RECORDS[image, hardware] for image in IMAGES],
        params:
            python=sys.executable,
        shell:
            "{params.python} containers/build.py lock {input}"

    for image in IMAGES:

        rule:
            name:
                f"{image}_{hardware}"
            input:
                []
                if image == "base"
                else [RECORDS["base", hardware], RECORDS["base", "cuda"]],
            output:
                RECORDS[image, hardware],
            threads: 2
            params:
                python=sys.executable,
                image=image,
                hardware=hardware,
                folder=FOLDER,
            shell:
                "{params.python} containers/build.py build {params.image} {params.hardware} {params.folder:q}"
