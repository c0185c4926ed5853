"""Samples in, candidates out.

Owns: batches, the off-policy objective, DeepSpeed, checkpoints, MLflow. Takes: samples. Emits: candidates.
Promises: weights, optimizer, offsets and consumed samples roll back together.
"""
