"""What Kubernetes is told: manifests and the image."""
