"""Serve an FP8 checkpoint by transformers' own server, which speaks the API of OpenAI.

Options of `transformers serve` follow the checkpoint: serve CHECKPOINT --port 8000. It needs
transformers and the packages of its server: pip install 'transformers[serving]'.
"""

import argparse


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-graphs", action="store_true", help="generate as transformers does, not in CUDA graphs"
    )
    parser.add_argument(
        "--compile", action="store_true", help="fuse each decoding step with torch.compile"
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="let no bit of an FP8 layer depend on the other tokens of a call",
    )
    parser.add_argument("checkpoint", help="a directory")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, help="of transformers serve, such as --port 8000"
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        from ..hf.serving import serve
    except ImportError as error:
        raise ValueError(f"serve needs transformers ({error}); pip install '.[hf]'") from error
    if arguments.no_graphs and arguments.compile:
        raise ValueError("--compile must be without --no-graphs, whose steps are not fused")
    serve(
        arguments.checkpoint,
        arguments.options,
        graphs=not arguments.no_graphs,
        compile=arguments.compile,
        batch_invariant=arguments.batch_invariant,
    )
    return 0
