"""Namespace routers in the lab: built for each kind of virtual device, loaded, counted.

Runs inside the lab, with nothing but the standard library. ``python3 -m nslab SPEC OUT``
makes one run of the plan (results.plan.Run with a ``bed``).
"""
