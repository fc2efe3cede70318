"""The program, which JAX's import would end: it takes a second, and kernels alone need it."""

import sys
from importlib.abc import MetaPathFinder

from run_vit_training import main


class NoJax(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname == "jax":
            raise RuntimeError("JAX is imported")


if __name__ == "__main__":
    sys.meta_path.insert(0, NoJax())
    sys.exit(main(sys.argv[1:]))
