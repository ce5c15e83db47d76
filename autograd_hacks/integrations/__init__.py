"""The library in other people's tools.  Each module is imported by itself, with the tool that it is for; see docs/integrations."""
