"""Checkpoints on object stores: S3, Google Cloud Storage, Azure, Unity Catalog volumes without a mount."""
