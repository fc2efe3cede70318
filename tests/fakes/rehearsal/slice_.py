"""A slice of TPU chips: what its metadata servers say, and how its chips are numbered."""

import itertools
import json
import threading
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from pathlib import Path

Sides = tuple[int, int, int]
GOOGLE = "0x1ae0"
PCI_DEVICE = {"v4": "0x005e", "v5litepod": "0x0063", "v5p": "0x0062", "v6e": "0x006f"}


@dataclass(frozen=True)
class Slice:
    """One or several slices of the same kind; ``chips`` are those of one, ``host`` of a host."""

    accelerator_type: str
    chips: Sides
    host: Sides = (2, 2, 1)
    slices: int = 1
    on_compute_engine: bool = False

    @property
    def hosts_each_way(self) -> Sides:
        x, y, z = (of // a for of, a in zip(self.chips, self.host, strict=True))
        return x, y, z

    @property
    def hosts(self) -> int:
        """Of all slices together."""
        return self.slices * prod(self.hosts_each_way)

    @property
    def devices(self) -> int:
        return self.slices * prod(self.chips)

    def attributes(self) -> list[dict]:
        """As ``_xla_get_all_device_attributes``: numbers go along rows, not host by host."""
        x, y, z = map(range, self.chips)
        places = itertools.product(range(self.slices), z, y, x)
        return [
            {"name": f"TPU:{number}", "coords": [x, y, z], "core_on_chip": 0}
            | ({"slice_index": of} if self.slices > 1 else {})
            for number, (of, z, y, x) in enumerate(places)
        ]

    def owners(self) -> list[int]:
        """For each device the worker that has it, counted over all slices."""
        found = []
        across, down, _ = self.hosts_each_way
        for each in self.attributes():
            x, y, z = (at // a for at, a in zip(each["coords"], self.host, strict=True))
            within = x + across * (y + down * z)
            found.append(each.get("slice_index", 0) * prod(self.hosts_each_way) + within)
        return found

    def process_of(self, worker: int) -> int:
        """The runtime numbers processes in an order of its own: the other way round here."""
        return self.hosts - 1 - worker

    def metadata(self, worker: int) -> dict[str, str]:
        """What torch_xla asks of a TPU VM's server (torch_xla/_internal/tpu.py)."""
        each = prod(self.hosts_each_way)
        tpu_env = {
            "ACCELERATOR_TYPE": self.accelerator_type,
            "TPU_PROCESS_BOUNDS": ",".join(map(str, self.hosts_each_way)),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": ",".join(map(str, self.host)),
            "WORKER_ID": str(worker % each),
        }
        if self.on_compute_engine:
            tpu_env = {
                "TPU_ACCELERATOR_TYPE": self.accelerator_type,
                "TPU_WORKER_ID": str(worker % each),
                "TOPOLOGY": "x".join(map(str, self.chips)),
                "HOST_BOUNDS": ",".join(map(str, self.hosts_each_way)),
                "CHIPS_PER_HOST_BOUNDS": ",".join(map(str, self.host)),
                "WRAP": "false,false,false",
            }
        if self.slices > 1:
            tpu_env["MEGASCALE_NUM_SLICES"] = str(self.slices)
        first = worker - worker % each
        ends = [f"127.0.0.{1 + first + other}" for other in range(each)]
        if not self.on_compute_engine:  # where they are names alone
            ends = [f"unknown:unknown:{end}" for end in ends]
        return {
            "tpu-env": "".join(f"{name}: '{value}'\n" for name, value in tpu_env.items()),
            "worker-network-endpoints": ",".join(ends),
        }


class MetadataServer:
    """One worker's, at a port of its own."""

    def __init__(self, answers: dict[str, str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                key = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
                known = key in answers and self.headers.get("Metadata-Flavor") == "Google"
                self.send_response(200 if known else 404)
                self.end_headers()
                self.wfile.write(answers[key].encode() if known else b"not found")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def describe(what: Slice, folder: Path, metadata_ports: list[int], store_port: int) -> Path:
    """Write the description that REHEARSAL names, and the PCI bus of a host."""
    kind = what.accelerator_type.partition("-")[0]
    for number in range(prod(what.host)):
        chip = folder / "pci" / f"0000:00:{number:02}.0"
        chip.mkdir(parents=True)
        (chip / "vendor").write_text(GOOGLE + "\n")
        (chip / "device").write_text(PCI_DEVICE[kind] + "\n")
    path = folder / "slice.json"
    path.write_text(
        json.dumps(
            {
                "slice": asdict(what),
                "pci": str(folder / "pci"),
                "metadata_ports": metadata_ports,
                "store_port": store_port,
            }
        )
    )
    return path
