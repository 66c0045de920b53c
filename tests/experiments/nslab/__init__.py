"""Namespace routers in the lab: built for each kind of virtual device, loaded, counted.

Runs inside the lab, with the package that is installed there. ``python3 -m nslab SPEC OUT``
makes one run of the plan (experiments.plan.Run with a ``bed``).
"""
