"""A TPU host, or several, of one machine's CPU: the unchanged program runs on them.

With this folder on PYTHONPATH and REHEARSAL naming a description (``slice_.py`` writes it), each
Python is on worker REHEARSAL_WORKER of a TPU slice. What tells a TPU from a CPU is replaced where
torch_xla meets the machine: the PCI bus, the metadata server, the environment that the C++ runtime
reads, and functions of ``_XLAC``. Nothing of the project's code is touched.

Several hosts: each computes the whole program on all of the slice's devices, virtual ones of its
CPU. Only its own count as local, and what another host's devices were given comes from there.
"""
