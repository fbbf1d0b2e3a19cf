"""The plan that a runtime builds from, and checks of the values that roles return. Runtimes themselves are plugins."""
