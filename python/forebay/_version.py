"""The version of the package, which is that of the service; a test compares it with Cargo.toml."""

__version__ = "0.1.0"
