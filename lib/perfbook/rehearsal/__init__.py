"""The stand-in server: a process that speaks vLLM's endpoints and obeys a known step-time law.

Rehearsals of a campaign, the null run of the client, fault tests and the truth of benchmarks all use it. Read
in this order: :mod:`~perfbook.rehearsal.law` (what a law says), :mod:`~perfbook.rehearsal.steptime` (what it
means, pure), :mod:`~perfbook.rehearsal.engine` (continuous batching, pure), then the files that touch
sockets, starting from :mod:`~perfbook.rehearsal.server`.
"""
