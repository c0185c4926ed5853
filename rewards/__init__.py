"""Interactions in, scored samples out.

Owns: the declared reward, signals, missing-feedback policy, baseline, ledger. Takes: interactions. Emits: samples.
Promises: every terminal outcome has an explicit reward, and missing feedback is never zero.
"""
