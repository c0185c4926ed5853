"""Kafka in, joined interactions and an exact archive out.

Owns: the wire (topics, ids, events), the producer and readers of Kafka, the event-time join, the Parquet archive.
Takes: inference and feedback events. Emits: interactions. Promises: exactly-once effect, nothing lost silently.
"""
