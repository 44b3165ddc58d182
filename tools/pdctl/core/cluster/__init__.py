"""The embedded Kubernetes cluster as values: what is built, where things lie, and what each daemon is told."""
