"""Puts faults into real runs, again and again, and compares each with a run without them.

python -m tests.faults        # or make faults
"""
