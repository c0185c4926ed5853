"""Candidates in, answers and events out.

Owns: the gateway, vLLM engines, routes, gates, the canary. Takes: candidates. Emits: inference and feedback events.
Promises: no bad model stays in front of users, and no swap fails a request.
"""
