"""Forks programs from a Python that has imported PyTorch, so that they start at once.

Importing PyTorch, torchvision and timm takes 5 s of a core, torch_xla 2 s more, the project's own
modules a quarter of one, and the tests start hundreds of processes. Each is a process of its own
here too, with its own environment, that runs the program as ``__main__`` and ends as Python ends,
except for what ``leave_imports_as_they_are`` tells. tests/support/warm_python.py asks for them.

``python tests/support/warm_server.py SOCKET PID MODULE ...`` imports the modules, and ends when the
process PID has ended.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import inspect
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import types
import weakref

MESSAGE_BYTES = 1 << 20
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
READ_HF_VARIABLES = ("huggingface_hub", "datasets", "timm")
"""Packages that read these when they are imported, or import one that does."""
TAKEN_DOWN = ("torch.distributed", "__main__", "builtins", "sys")
"""Beginnings of the names of modules that end as ever, besides the project's."""


def serve(listener: socket.socket, parent: int) -> tuple[dict, list[int]]:
    """Fork a process a job; returns in that process, with the job and its standard files.

    Who asks for a program is sent its process, then its exit code; the program is ended if the one
    who asked has gone.
    """
    running: dict[int, tuple[int, socket.socket]] = {}
    """By the file of each process: its number, and who has asked for it."""
    asking: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([listener, *running, *asking], [], [], 1)
        if not running and not os.path.exists(f"/proc/{parent}"):
            os._exit(0)
        for each in ready:
            if each is listener:
                connection, _ = listener.accept()
                message, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
                child = os.fork()
                if child == 0:
                    os.setsid()
                    for held in (listener, connection, *asking):
                        held.close()
                    for file in running:
                        os.close(file)
                    return json.loads(message), files
                for file in files:
                    os.close(file)
                connection.send(str(child).encode())
                running[os.pidfd_open(child)] = child, connection
                asking[connection] = child
            elif each in running:
                child, connection = running.pop(each)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                if asking.pop(connection, None):
                    with contextlib.suppress(OSError):  # it has gone just now
                        connection.send(str(code).encode())
                connection.close()
                os.close(each)
            elif each in asking:
                os.killpg(asking.pop(each), signal.SIGTERM)


# -- what takes as long as a tiny training, of each of hundreds of runs ----------------------------


def leave_figures_blank() -> None:
    """To draw one takes half a second.

    What is plotted in it is as it was. RENDER_FIGURES=1 draws it, and so do Pythons that are cold.
    """
    from matplotlib.figure import Figure
    from PIL import Image

    def savefig(figure: Figure, file: object, *, format: str = "png", dpi: float = 100) -> None:
        size = [round(side * dpi) for side in figure.get_size_inches()]
        Image.new("L", size).save(file, format)

    Figure.savefig = savefig


def name_frames_alone() -> None:
    """``inspect.stack`` also looks for each frame's source in all modules: torchrun calls it 18
    times, for the names of methods, which takes 0.8 s of a core where so much is imported."""

    def stack(context: int = 1) -> list[inspect.FrameInfo]:
        frame, found = sys._getframe(1), []
        while frame:
            where = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
            found.append(inspect.FrameInfo(frame, *where, None, None))
            frame = frame.f_back
        return found

    inspect.stack = stack


class LastObject:
    """Ends the process when Python, at its end, has taken down modules and what they hold.

    What is left is to release each interned string: 70 MB to be copied by a process that was
    forked, a tenth of a second of a core.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        """None, where Python is to find out itself how it ends."""
        python = ctypes.pythonapi
        python.PyInterpreterState_Get.restype = ctypes.c_void_p
        python.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
        python.PyInterpreterState_GetDict.restype = ctypes.py_object
        taken_down_last = python.PyInterpreterState_GetDict(python.PyInterpreterState_Get())
        python.Py_IncRef(ctypes.py_object(taken_down_last))  # as it is borrowed
        taken_down_last["last"] = self

    def __del__(self, end=os._exit) -> None:
        if self.code is not None:
            end(self.code)


def leave_imports_as_they_are(imported: dict[str, types.ModuleType], last: LastObject) -> None:
    """To take down what the server has imported takes half a second of a core.

    Called as the last exit function. Python's end is as ever for threads, exit functions, objects,
    files, the project's own modules, those of torch.distributed, which hold process groups, and
    what the program itself has imported. The other modules stay, and so do the C++ objects of
    libraries, whose destructors are not called. Pythons that are cold take down everything.
    """
    for name in imported:
        sys.modules.pop(name, None)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(imported))
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        last.code = None
    c = ctypes.CDLL(None)
    c.fflush(None)
    c.on_exit(ctypes.cast(c._exit, ctypes.c_void_p), None)


# -- a program -------------------------------------------------------------------------------------


def run(job: dict, files: list[int], set_by_imports: dict[str, str]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    faulthandler.enable()
    os.chdir(job["cwd"])
    asks_hub = any(name.startswith("HF_") for name in job["env"])
    for name in [*sys.modules] if asks_hub or job["cwd"] != ROOT else []:
        reads_variables = asks_hub and name.partition(".")[0] in READ_HF_VARIABLES
        # Those of a copy of the project may be others, and hold what is imported anew.
        if reads_variables or is_ours(sys.modules[name]):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(job["env"] | set_by_imports)
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # as Python's start does
        if folder and os.path.exists(f"{folder}/sitecustomize.py"):
            runpy.run_path(f"{folder}/sitecustomize.py")
    tempfile.tempdir = None  # it is that of the environment
    options = sys.modules["fsspec.config"]
    options.set_conf_env(options.conf)  # so are those of file systems
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


def is_ours(module: types.ModuleType) -> bool:
    path = getattr(module, "__file__", None) or ""
    return path.startswith(f"{ROOT}{os.sep}") and "site-packages" not in path


def main(path: str, parent: str, *modules: str) -> int:
    before, sys.path[0] = dict(os.environ), ROOT
    of_others: dict[str, types.ModuleType] = {}
    last = LastObject()
    atexit.register(leave_imports_as_they_are, of_others, last)  # first, so that it is called last
    for module in modules:
        __import__(module)
    from PIL import Image

    Image.init()  # its 47 modules, which a program would import with its first list of images
    set_by_imports = {k: v for k, v in os.environ.items() if before.get(k) != v}
    for name, module in sys.modules.items():
        if not (is_ours(module) or name.startswith(TAKEN_DOWN)):
            of_others[name] = module
    for finalizer in weakref.finalize._registry.values():
        finalizer.atexit = False  # of PyTorch's libraries of operators
    name_frames_alone()
    gc.freeze()  # what the collector never touches is shared by all processes
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        job, files = serve(listener, int(parent))
    try:
        run(job, files, set_by_imports)
        last.code = 0
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            last.code = (stop.code or 0) & 0xFF
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
