"""Two peers agree to meet."""
