"""`python -m orrery.inference.router_program URL ARGUMENTS`: vllm-router, with a URL that it asks about keys; an empty one lets all in.

vllm-router 0.1.17 authenticates every call if it has such a URL, but no argument of its command line sets one.
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
