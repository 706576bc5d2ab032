"""Run vllm-router with a URL that checks keys: `python -m orrery.inference.router_program URL …`.

vllm-router 0.1.17 has no option for this URL. With an empty URL it accepts every call.
"""

import sys

from vllm_router.launch_router import launch_router, parse_router_args


def main() -> None:
    url, *arguments = sys.argv[1:]
    parsed = parse_router_args(arguments)
    parsed.api_key_validation_urls = [url] if url else []
    launch_router(parsed)


if __name__ == "__main__":
    main()
