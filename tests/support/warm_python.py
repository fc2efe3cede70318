"""A Python that has imported PyTorch already: programs are forked from it, so they start at once.

Importing PyTorch, torchvision and timm takes 5 s of a core, torch_xla 2 s more, the project's own
modules a quarter of one, and the tests start hundreds of processes. Each is a process of its own
here too, with its own environment, that runs the program as ``__main__`` and ends as Python ends.

``python tests/support/warm_python.py run_vit_training.py FLAGS``, ``... -m MODULE FLAGS`` and
``... -c CODE`` run as without it, where WARM_PYTHON names the socket of a server.
"""

import faulthandler
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import types

MESSAGE_BYTES = 1 << 20
PASSED_ON = (signal.SIGTERM, signal.SIGINT)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


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


def serve(listener: socket.socket, parent: int) -> tuple[dict, list[int]]:
    """Fork a process a job; returns in that process, with the job and its standard files."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    while True:
        while not select.select([listener], [], [], 1)[0]:
            if not os.path.exists(f"/proc/{parent}"):
                os._exit(0)
        connection, _ = listener.accept()
        message, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            child = os.fork()
            if child == 0:
                os.setsid()
                connection.close()
                return json.loads(message), files
            watch(child, connection)
        connection.close()
        for file in files:
            os.close(file)


def watch(child: int, connection: socket.socket) -> None:
    """Tell the exit code; end the child if the one who asked has gone."""
    connection.send(str(child).encode())
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.killpg(child, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended in ready:
        connection.send(str(code).encode())
    os._exit(0)


def leave_figures_blank() -> None:
    """To draw one takes half a second, as long as a tiny training, of each of hundreds of runs.

    What is plotted in it is as it was. RENDER_FIGURES=1 draws it, and so do Pythons that are cold.
    """
    from matplotlib.figure import Figure
    from PIL import Image

    def savefig(figure: Figure, file: object, *, format: str = "png", dpi: float = 100) -> None:
        size = [round(side * dpi) for side in figure.get_size_inches()]
        Image.new("L", size).save(file, format)

    Figure.savefig = savefig


def run(job: dict, files: list[int], set_by_imports: dict[str, str]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    faulthandler.enable()
    os.chdir(job["cwd"])
    if job["cwd"] != ROOT:  # a copy of the project, whose modules may be others
        for name, module in [*sys.modules.items()]:
            path = getattr(module, "__file__", None) or ""
            if path.startswith(f"{ROOT}{os.sep}") and "site-packages" not in path:
                del sys.modules[name]
    os.environ.clear()
    os.environ.update(job["env"] | set_by_imports)
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # as Python's start does
        if folder and os.path.exists(f"{folder}/sitecustomize.py"):
            runpy.run_path(f"{folder}/sitecustomize.py")
    tempfile.tempdir = None  # it is that of the environment
    if "RENDER_FIGURES" not in os.environ:
        leave_figures_blank()
    first, *rest = job["argv"]
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], job["cwd"]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv, sys.path[0] = rest, job["cwd"]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = job["argv"], os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


def main(argv: list[str]) -> int:
    if argv[0] != "--serve":
        code = ask(argv)
        if code < 0:
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        return code
    _, path, parent, *modules = argv
    before, sys.path[0] = dict(os.environ), ROOT
    for module in modules:
        __import__(module)
    set_by_imports = {k: v for k, v in os.environ.items() if before.get(k) != v}
    gc.freeze()  # what the collector never touches is shared by all processes
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        job, files = serve(listener, int(parent))
    run(job, files, set_by_imports)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
