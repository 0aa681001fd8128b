"""What runs at a site: the Flower ClientApp, the worker behind it, and the node they serve."""
