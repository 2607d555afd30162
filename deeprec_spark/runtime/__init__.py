"""Nodes of a training job on Spark executors: coordinator, parameter servers, workers, and how they talk.

From the driver inwards: `launch` starts a Spark task for each node (`slots` looks first whether they fit), in which
`supervisor` runs the process of `node`: a parameter server (`server` over a LocalStore) or a worker (`context`).
`coordinator` in the driver keeps `membership`, `phases` and the `work_queue`; nodes talk to it by `worker_client`.
`remote_store` is the worker's store over all servers. All calls go through `transport`, encoded by `messages`.
"""
