"""Faults in real runs: each faulty run is restarted, and compared with a run without faults.

python -m tests.reliability.faults        # or make faults
"""
