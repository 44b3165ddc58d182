"""The embedded Kubernetes cluster: building its programs, starting and ending it, and asking it things."""
