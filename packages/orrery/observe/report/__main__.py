"""The report stage: write `report/index.html` and `report/summary.txt`."""

import time

from orrery.manifest.publish import make_folder, write_atomic
from orrery.observe.report.data import RunData, reading, wall_s
from orrery.observe.report.page import render, summary
from orrery.runtime.role_context import role_process
from orrery.runtime.run_directory import report_page


def main() -> None:
    with role_process("report") as ctx:
        ctx.health.doing("drawing the report")
        start_s = time.time()
        run = RunData.load(ctx.run_dir)
        page = report_page(ctx.run_dir)
        make_folder(page.parent)
        with reading("metrics/"):
            spent_s, others_s = wall_s(run), wall_s(run, "report")
        html = render(run, spent_s)
        write_atomic(page, html.encode())
        line = summary(run, others_s + time.time() - start_s, page)
        write_atomic(page.with_name("summary.txt"), (line + "\n").encode())
        ctx.log.info(line)


if __name__ == "__main__":
    main()
