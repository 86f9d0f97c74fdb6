"""Ray Serve on a cluster of its own; `ray_cluster.RayCluster` runs this with an interpreter that has Ray.

The argument is a port. Each line of stdin holds the arguments of the application, which is then deployed anew, or null
to kill a replica; `done` answers it. The cluster ends with stdin.
"""

import json
import sys

import ray
from ray import serve

from server.ray.application import app


def main() -> None:
    ray.init(log_to_driver=False, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    for line in sys.stdin:
        if arguments := json.loads(line):
            serve.run(app(arguments), name="ramet")
        else:
            names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
            ray.kill(ray.get_actor(min(name for name in names if "#replica#" in name), namespace="serve"))
        print("done", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
