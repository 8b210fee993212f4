"""Streaming timers: what a streamed response looked like on the wire, and what its times mean.

``sse`` and ``chunks`` read the bytes, ``response`` puts both on top of HTTP, ``client`` receives them with
kernel times, ``timing`` holds the definitions, ``load`` runs a cell and ``validity`` says what it is worth.
"""
