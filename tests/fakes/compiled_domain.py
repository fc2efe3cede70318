"""Prints, as JSON, what lies on a device in the TPU compiler's program of the flags given.

The types of instructions' results, of those that are a token dimension of the whole image: every
size that is a multiple of the number of tokens that is given first.
"""

import json
import re
import sys
from unittest import mock

import run_vit_training
from tools.compile_only import compiler, hlo


def whole_tokens(text: str, tokens: int) -> list[str]:
    """Return the types that have a dimension of all tokens, of all instructions of a module."""
    computations, _ = hlo.parse_module(text)
    found = set()
    for instructions in computations.values():
        for each in instructions:
            for kind, sizes in re.findall(r"\b([a-z]+\d+)\[([\d,]+)\]", each.shape):
                if any(int(size) % tokens == 0 for size in sizes.split(",")):
                    found.add(f"{kind}[{sizes}] {each.opcode}")
    return sorted(found)


def main() -> None:
    tokens, *flags = sys.argv[1:]
    found: list[list[str]] = []
    compile_graph = compiler.compile_graph

    def watched(*args, **kwargs):
        compiled = compile_graph(*args, **kwargs)
        assert compiled.hlo
        found.append(whole_tokens(compiled.hlo, int(tokens)))
        return compiled

    with mock.patch.object(compiler, "compile_graph", watched):
        code = run_vit_training.main(["--compile_only", *flags])
    print(json.dumps(found))
    sys.exit(code)


if __name__ == "__main__":
    main()
