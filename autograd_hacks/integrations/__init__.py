"""The library in other people's tools, a module for each, which needs that tool: see docs/integrations."""
