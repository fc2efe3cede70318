"""A Python that has imported PyTorch already: a program is forked by tests/support/warm_server.py.

``python tests/support/warm_python.py run_vit_training.py FLAGS``, ``... -m MODULE FLAGS`` and
``... -c CODE`` run as without it, where WARM_PYTHON names the socket of a server.
"""

import json
import os
import signal
import socket
import sys

MESSAGE_BYTES = 1 << 20
PASSED_ON = (signal.SIGTERM, signal.SIGINT)


def ask(argv: list[str]) -> int:
    """Run a program by the server, on this process's files; returns its exit code."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ["WARM_PYTHON"])
        job = {"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ)}
        socket.send_fds(server, [json.dumps(job).encode()], [0, 1, 2])
        program = int(server.recv(MESSAGE_BYTES))
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: os.killpg(program, number))
        return int(server.recv(MESSAGE_BYTES))


def main(argv: list[str]) -> int:
    code = ask(argv)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
