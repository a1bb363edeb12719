"""From a run's config to what starts it on rented machines: container, manifests, scripts. It calls no cloud.

    files = render(config, LaunchOptions(target="gke", topology="v5p:4x4x4", image="...")).files     # name to text

`tpu/README.md` goes from an empty cloud project to a finished run.
"""

from orchestra_jax.launch.options import TARGETS, LaunchOptions
from orchestra_jax.launch.render import Launch, render
from orchestra_jax.launch.topology import Slice, parse_topology

__all__ = ["TARGETS", "Launch", "LaunchOptions", "Slice", "parse_topology", "render"]
