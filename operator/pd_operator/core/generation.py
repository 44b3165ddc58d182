"""The generation: a hash of everything that P and D must agree on. The router pairs equal generations only.

What counts is what makes a read between two engines wrong or refused, or makes one of the two legs of a request fail:

* the weights and the prompt's tokens: model, revision, dtype, arguments of both roles (templates, parsers, LoRA), the
  volumes that bring their files;
* the code and the layout of the KV: image, vLLM version, block size, both tensor-parallel sizes, device, variables of
  both roles (attention backend, cache layout);
* the protocol: connector (in a cluster, also the image that brings it), backend, the bidirectional flag, the
  connector's other keys, and the lease, whose renewals D paces by its own copy of the value;
* what a request may ask for: served name and longest prompt, since both legs carry the client's request.

What does not count: replicas, the router, names, limits per engine (sequences, memory share, start and stop times),
role arguments and variables (the shared ones are refused there), a role's prefix cache, and the two values that only
one side reads: D's time to live, which travels inside the handle, and P's threshold. They are on both roles' command
lines all the same, as vLLM asks for one configuration on both, so an edit of either restarts the engines of both roles;
those of before and after it pair, and each role rolls at its own pace.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from pd_operator.core.model import PDDeployment
from pd_operator.core.profiles import backend_of, profile_of

FORMAT: Final = 1
"""Raised when the list of what counts changes, since old and new hashes must then differ."""

LENGTH: Final = 10


def generation(deployment: PDDeployment, connector_image: str | None = None) -> str:
    """Ten hexadecimal digits, usable as a label value. Pure: equal specs give equal text on every machine.

    ``connector_image`` is the image that brings the connector into pods; None where no image does.
    """
    text = json.dumps(agreement(deployment, connector_image), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def agreement(deployment: PDDeployment, connector_image: str | None = None) -> dict[str, Any]:
    """What is hashed, readable: for showing why two generations differ."""
    spec = deployment.spec
    transfer = spec.kv_transfer
    brought: dict[str, Any] = {} if connector_image is None else {"connectorImage": connector_image}
    if spec.engine.volumes:
        brought["volumes"] = sorted(
            json.dumps(one.model_dump(mode="json"), sort_keys=True) for one in spec.engine.volumes
        )
    return {
        **brought,
        "format": FORMAT,
        "model": spec.model.name,
        "revision": spec.model.revision,
        "servedName": spec.model.public_name,
        "maxModelLen": spec.model.max_model_len,
        "dtype": spec.model.dtype.value,
        "image": spec.engine.image,
        "vllmVersion": spec.engine.vllm_version,
        "blockSize": spec.engine.block_size,
        "extraArgs": list(spec.engine.extra_args),
        "env": sorted(json.dumps(variable.model_dump(mode="json"), sort_keys=True) for variable in spec.engine.env),
        "tensorParallelSizes": [spec.prefill.tensor_parallel_size, spec.decode.tensor_parallel_size],
        "device": profile_of(spec).device.value,
        "backend": backend_of(spec).value,
        "connector": transfer.connector.value,
        "bidirectional": transfer.bidirectional.value,
        "leaseDurationSeconds": transfer.lease_duration_seconds,
        "extraConfig": sorted([entry.name, entry.value] for entry in transfer.extra_config),
    }
