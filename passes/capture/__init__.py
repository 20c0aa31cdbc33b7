"""The first phase: Dynamo's graph becomes pre-dispatch ATen, a fake tensor on every node."""
